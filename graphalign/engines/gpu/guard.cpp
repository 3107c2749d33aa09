// The CPU build of torch has no device guard for CUDA, so that even a fake tensor on `cuda:0` raises. This one does nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
