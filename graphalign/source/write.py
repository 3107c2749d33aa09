"""Files of a generated patch: the module in one of its styles, and the diff beside it."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

from graphalign.errors import PatchError
from graphalign.ir.files import write_bytes
from graphalign.source.generate import Generated

DOCUMENTS = frozenset({"auto_docstring"})
"""Decorators of Transformers 5 that write a docstring and take functions for classes outside their class; left out of single functions."""
STYLES = ("module", "override", "patchgen")


def files(generated: Generated, output: Path, style: str) -> dict[Path, str]:
    """Path to content. `module`: the file and its diff; `override`: only what changes; `patchgen`: for VeOmni's generator."""
    diff = output.with_suffix(".diff")
    if style == "module":
        return {output: generated.text, diff: generated.diff}
    if style == "override":
        return {output: override(generated), diff: generated.diff}
    return {output: patchgen(generated), diff: generated.diff}


def write(contents: dict[Path, str]) -> None:
    """Write files, each atomically."""
    for path, text in contents.items():
        write_bytes(path, text.encode())


def moved(contents: dict[Path, str]) -> list[str]:
    """A unified diff for every file that is not what would be written now; empty if nothing moved."""
    out = []
    for path, text in contents.items():
        try:
            have = path.read_text()
        except (OSError, UnicodeDecodeError):
            have = ""
        if have != text:
            lines = difflib.unified_diff(have.splitlines(), text.splitlines(), str(path), f"{path} (regenerated)", lineterm="", n=1)
            out.append("\n".join(lines))
    return out


def changed(generated: Generated) -> dict[str, list[str]]:
    """Class to its changed methods; under the empty name the changed functions."""
    before, after = _definitions(generated.stock.text), _definitions(generated.body)
    out: dict[str, list[str]] = {}
    for (owner, name), text in after.items():
        if before.get((owner, name)) != text:
            out.setdefault(owner, []).append(name)
    return out


def override(generated: Generated) -> str:
    """Only the changed functions and methods, as an import of the stock module, subclasses and `patch`, for people with their own fork."""
    stock, after = generated.stock, _definitions(generated.body)
    found = changed(generated)
    lines = [
        x
        for x in generated.text.split("\n")
        if x.startswith(("# Made by", "# source sha", "# patch sha", "# target", "# regime", "# versions"))
    ]
    out = [*lines, "", "import torch", f"import {stock.module} as stock", ""]
    sets = [x for x in generated.body.split("\n") if x.startswith("_LAYERS_")]
    out += [*sets, *([""] if sets else []), ""]
    pieces, table = [], []
    for owner, names in found.items():
        for name in names:
            label = f"{owner}_{name}" if owner else name
            text = after[owner, name]
            if _uses_super(text):
                text = text.replace("super()", f"super(stock.{owner}, self)")
            pieces.append(_with_stock_names(_renamed(text, name, label), stock.text, found, label))
            table.append((owner, name, label))
    out.append("\n\n\n".join(pieces))
    out.append(generated.helpers.rstrip("\n"))
    out += ["", "", "def patch():", '    """Put the changed functions into the stock module, for every model of it in this process."""']
    for owner, name, label in table:
        out.append(f"    stock.{f'{owner}.' if owner else ''}{name} = {label}")
    return "\n".join(out) + "\n"


def patchgen(generated: Generated) -> str:
    """A configuration for VeOmni's `patchgen`: one `override_method` or `replace_function` for each changed function."""
    after, found = _definitions(generated.body), changed(generated)
    target = f"patched_{generated.stock.module.rpartition('.')[2]}.py"
    comments = [x for x in generated.text.split("\n")[:8] if x.startswith("# ")]
    out = [
        *comments,
        "",
        "import torch",
        "from veomni.patchgen.patch_spec import PatchConfig",
        "",
        f"from {generated.stock.module} import *  # noqa: F403",
        "",
    ]
    out += [
        "config = PatchConfig(",
        f'    source_module="{generated.stock.module}",',
        f'    target_file="{target}",',
        '    description="rounds where inference rounds",',
        ")",
        "",
    ]
    for x in (x for x in generated.body.split("\n") if x.startswith("_LAYERS_")):
        out.append(f"config.add_post_import_block({x!r})")
    if generated.helpers:
        block = generated.helpers.strip("\n").replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
        out += [f'config.add_post_import_block("""\n{block}\n""")']
    for owner, names in found.items():
        for name in names:
            how = f'override_method("{owner}.{name}")' if owner else f'replace_function("{name}")'
            label = f"{owner}_{name}_aligned".lstrip("_")  # patchgen gives it the name of what it replaces
            out += ["", "", f"@config.{how}", _renamed(after[owner, name], name, label)]
    return "\n".join(out) + "\n"


def _definitions(text: str) -> dict[tuple[str, str], str]:
    lines = text.split("\n")
    out: dict[tuple[str, str], str] = {}

    def add(owner: str, n: ast.FunctionDef) -> None:
        first = min([n.lineno, *(d.lineno for d in n.decorator_list)])
        documents = {d.lineno for d in n.decorator_list if isinstance(d, ast.Name) and d.id in DOCUMENTS}
        key = (owner, n.name)
        if key not in out:
            out[key] = "\n".join(lines[i - 1] for i in range(first, (n.end_lineno or first) + 1) if i not in documents)

    for n in ast.parse(text).body:
        if isinstance(n, ast.FunctionDef):
            add("", n)
        elif isinstance(n, ast.ClassDef):
            for m in n.body:
                if isinstance(m, ast.FunctionDef):
                    add(n.name, m)
    return out


def _dedented(text: str) -> str:
    import textwrap

    return textwrap.dedent(text)


def _renamed(text: str, name: str, label: str) -> str:
    return _dedented(text).replace(f"def {name}(", f"def {label}(", 1)


def _uses_super(text: str) -> bool:
    return "super()" in text


def _with_stock_names(text: str, stock: str, found: dict[str, list[str]], label: str) -> str:
    """Names of the stock module get its prefix; what is changed here keeps its own."""
    import builtins

    tree = ast.parse(stock)
    known = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    for n in ast.walk(tree):
        if isinstance(n, ast.Import | ast.ImportFrom):
            known |= {(a.asname or a.name).partition(".")[0] for a in n.names}
        elif isinstance(n, ast.Assign) and n in tree.body:
            known |= {t.id for t in n.targets if isinstance(t, ast.Name)}
    known -= {"torch"} | set(dir(builtins)) | set(found.get("", []))
    parsed = ast.parse(text)
    lines = [x.encode() for x in text.split("\n")]
    local = {a.arg for f in ast.walk(parsed) if isinstance(f, ast.arguments) for a in (*f.args, *f.kwonlyargs)}
    local |= {n.id for n in ast.walk(parsed) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    at = [(n.lineno, n.col_offset) for n in ast.walk(parsed) if isinstance(n, ast.Name) and n.id in known - local]
    for line, column in sorted(at, reverse=True):
        lines[line - 1] = lines[line - 1][:column] + b"stock." + lines[line - 1][column:]
    return b"\n".join(lines).decode()


def refuse_style(style: str) -> None:
    """Raises PatchError for an unknown style."""
    if style not in STYLES:
        raise PatchError(f"unknown style {style!r}", hint=f"give one of {', '.join(STYLES)}")
