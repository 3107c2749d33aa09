"""The parts of the simulation that need neither vLLM nor Triton."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from graphalign.engines.gpu import script
from graphalign.engines.gpu.interpret import power_above, split_arguments
from graphalign.engines.gpu.model import LARGE, Thin
from graphalign.engines.gpu.pieces import Piece, piece_key, renaming


def test_the_script_imports_nothing_of_graphalign_but_itself_and_the_engine_scripts() -> None:
    """It runs in other environments, where only a stand-in of the package is importable."""
    allowed = ("graphalign.engines.gpu", "graphalign.capture")
    folder = Path(script.__file__).parent
    for path in folder.glob("*.py"):
        if path.name == "targets.py":  # read by the parent process only
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("graphalign"):
                names = [a.name for a in node.names]
                assert str(node.module).startswith(allowed), path.name
                assert node.module != "graphalign.capture" or set(names) <= {"engine_script", "engine_arguments"}, path.name


def traced(scale: float, name: str = "x") -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    x = graph.placeholder(name)
    x.meta["example_value"] = torch.empty(3, 4, dtype=torch.bfloat16)
    y = graph.call_function(torch.mul, (x, scale))
    graph.output((y,))
    return torch.fx.GraphModule({}, graph)


def test_a_pieces_key_ignores_names_and_nothing_else() -> None:
    assert piece_key(traced(2.0, "a")) == piece_key(traced(2.0, "b"))
    assert piece_key(traced(2.0)) != piece_key(traced(3.0))


def piece(*paths: tuple[str, ...]) -> Piece:
    return Piece(0, False, None, [], [], [], "", list(paths))


def test_module_paths_of_equal_pieces_correspond() -> None:
    a, b = piece(("layers.1", "layers.1.mlp"), ("layers.2",)), piece(("layers.4", "layers.4.mlp"), ("layers.5",))
    assert renaming(a, b) == {"layers.1": "layers.4", "layers.1.mlp": "layers.4.mlp", "layers.2": "layers.5"}


@pytest.mark.parametrize("other", [(("layers.4",), ("layers.5",)), (("layers.4",),) * 2])
def test_paths_that_do_not_correspond_are_no_equal_piece(other: tuple[tuple[str, ...], ...]) -> None:
    assert renaming(piece(("layers.1",), ("layers.1",)), piece(*other)) == (None if len(set(other)) > 1 else {"layers.1": "layers.4"})


def test_large_uninitialised_tensors_are_thin_and_can_be_loaded() -> None:
    rows = 2 * LARGE // 64
    with Thin():
        weight = torch.nn.Parameter(torch.empty(rows, 64, dtype=torch.bfloat16), requires_grad=False)
        table = torch.arange(rows * 64).view(rows, 64)
        weight.zero_()
        weight.data.narrow(0, 8, 4).copy_(torch.full((), 3.0).expand(4, 64))
        weight[2] = torch.full((64,), 5.0)
    assert weight.untyped_storage().nbytes() == rows * 2
    assert table.untyped_storage().nbytes() == rows * 64 * 8
    assert weight[:14, 0].tolist() == [0, 0, 5, 0, 0, 0, 0, 0, 3, 3, 3, 3, 0, 0]
    assert bool((weight[8:12] == 3).all())


def test_small_tensors_stay_as_they_are() -> None:
    with Thin():
        assert torch.empty(16, 16).stride() == (16, 1)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("buf0, arg1_1, s72, 128", ["buf0", "arg1_1", "s72", "128"]),
        ("reinterpret_tensor(buf0, (s72, 4), (4, 1), 8), buf1", ["reinterpret_tensor(buf0, (s72, 4), (4, 1), 8)", "buf1"]),
    ],
)
def test_arguments_of_a_launch_are_split_at_the_top_level(text: str, parts: list[str]) -> None:
    assert split_arguments(text) == parts


def test_powers_of_two() -> None:
    found: Any = [power_above(n) for n in (1, 2, 3, 128, 129)]
    assert found == [1, 2, 4, 128, 256]
