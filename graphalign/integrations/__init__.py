"""One hook per RL stack: each puts a patch on the models that the stack builds, in the stack's own process.

`trl` takes the trainer; `verl`, `openrlhf`, `skyrl` and `open_instruct` run in workers that a user does not start and read the patch's
file from the environment variable `GRAPHALIGN_PATCH`. None of them imports its stack before the stack does.
"""
