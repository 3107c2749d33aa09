"""What stands around the changed text in a generated file: where it comes from, and how it is put to use."""

from __future__ import annotations

from torch import nn

from graphalign.patch.spec import PatchSpec, digest
from graphalign.source.guard import FUNCTION
from graphalign.source.stock import Stock

AS_IN_TRANSFORMERS = "I001, PLR0402, PYI041, RUF012, RUF022, RUF059, RUF100, SIM102"
"""Rules of ruff that Transformers' files do not keep; all others are on."""
CALL_ONCE = "_rounded_once"
"""Name of the function that rounds a value once for all its readers; it stands in the generated file."""
CALL_NORM = "_layer_norm"
"""Name of the function that runs a LayerNorm in FP32; it stands in the generated file."""
NORM = '''

def {call}(module, x{parameters}):
    """module(x) of an `nn.LayerNorm`, in FP32 and not rounded{words}."""
{early}    weight, bias = (p if p is None else p.float() for p in (module.weight, module.bias))
{steps}    return torch.nn.functional.layer_norm(x.float(), module.normalized_shape, weight, bias, module.eps)
'''
"""What runs a LayerNorm in FP32, with its name."""
APART = """    if apart:
        dims = list(range(-len(module.normalized_shape), 0))
        mean, x = x.float().mean(dims, True), {once}(x).float()
        x = (x - mean) * torch.rsqrt((x - mean).pow(2).mean(dims, True) + module.eps)
        x = x if weight is None else x * weight
        return x if bias is None else x + bias
"""
"""Its steps, of which the mean reads the input as it is and the others read it rounded."""
ONCE = '''

def {call}(x, wanted=True, wide=False):
    """x in {low} if that is wanted (in FP32 again if `wide`): one tensor for all who read it so, where their gradients are added up."""
    if not wanted:
        return x
    x = _kept(x, "_rounded", torch.{low})
    return _kept(x, "_wide", torch.float32) if wide else x


def _kept(x, name, dtype):
    if x.dtype == dtype:
        return x
    made = getattr(x, name, None)
    if made is None or made.requires_grad != (x.requires_grad and torch.is_grad_enabled()):
        made = x.to(dtype)
        setattr(x, name, made)
    return made
'''
"""What rounds a value once, with its name and the format to be put in."""
_PATCH = '''

# What follows is not from Transformers: how this file is put to use.

_STOCK = "{module}"


def patch(model):
    """Give every module of a live model whose class is the stock file's the class of this file. Parameters, hooks and names stay.

    Do it before the model is sharded or compiled. Returns the number of modules; raises if there is none.
    """
    done = 0
    for name, module in model.named_modules():
        if type(module).__module__ != _STOCK:
            continue
        if "forward" in vars(module):
            raise RuntimeError(f"{{name or 'the model'}} runs a forward that was put on the instance (Liger?); remove it first")
        module.__class__ = globals()[type(module).__name__]
        done += 1
    if not done:
        raise RuntimeError(f"no module of this model is from {{_STOCK}}")
    return done
'''
_REGISTER = '''

def register():
    """Let Transformers' auto classes build the models of this file for the stock configuration."""
    import transformers

{lines}
'''


def header(stock: Stock, spec: PatchSpec, patch_digest: str) -> str:
    """Comment lines: origin, digests, target, regime, versions. No time, so that the same input gives the same file."""
    target = ", ".join(f"{k} {spec.target[k]}" for k in ("device", "isa", "tp") if k in spec.target)
    regime = ", ".join(f"{k} {v}" for k in ("param_dtype", "attention", "experts") if (v := spec.regime.get(k)))
    versions = ", ".join(f"{k} {v}" for k, v in sorted(spec.versions.items()) if k in ("vllm", "torch", "transformers", "graphalign"))
    lines = [
        f"Made by `graphalign source` from {stock.file}: the same model, which rounds where inference rounds.",
        f"source sha256 {digest(stock.raw)}",
        f"patch sha256 {patch_digest}",
        f"target: {target}" + (" (simulated: not compared with a real device)" if spec.simulated else ""),
        f"regime: {regime}",
        f"versions: {versions}",
    ]
    if stock.dropped:
        lines.append(f"without hub kernels, which would replace what is aligned: {'; '.join(stock.dropped)}")
    lines.append(f"ruff: noqa: {AS_IN_TRANSFORMERS}")
    return "".join(f"# {x}\n" for x in lines)


def helpers(*, guarded: bool, once: str, norm: bool = False, apart: bool = False) -> str:
    """Functions that changed lines call.

    Args:
        guarded: one that checks the inputs of layers.
        once: format that one rounds values to, once for all readers.
        norm: one that runs a LayerNorm in FP32.
        apart: it can do so step by step.
    """
    out = (FUNCTION if guarded else "") + (ONCE.format(call=CALL_ONCE, low=once) if once else "")
    if norm:
        out += NORM.format(
            call=CALL_NORM, parameters=", wide=True" + ", apart=False" * apart,
            words="; `apart`: its mean is that of x, all else is taken from x rounded" * apart,
            early="    if not wide:\n        return module(x)\n", steps=APART.format(once=CALL_ONCE) if apart else "",
        )  # fmt: skip
    return out


def footer(stock: Stock, model: nn.Module, needed: str) -> str:
    """`patch` and `register` behind the functions that are needed, see `helpers`."""
    out = needed + _PATCH.format(module=stock.module)
    lines = []
    cls = type(model)
    config = getattr(cls, "config_class", None)
    if config is not None:
        name = cls.__name__
        auto = "AutoModelForCausalLM" if name.endswith(("ForCausalLM", "LMHeadModel")) else "AutoModel"
        lines.append(f"    transformers.{auto}.register({name}.config_class, {name}, exist_ok=True)")
        inner = getattr(model, str(getattr(model, "base_model_prefix", "")), None)
        if inner is not None and type(inner).__module__ == stock.module and type(inner) is not cls:
            base = type(inner).__name__
            lines.append(f"    transformers.AutoModel.register({base}.config_class, {base}, exist_ok=True)")
    return out + (_REGISTER.format(lines="\n".join(lines)) if lines else "")
