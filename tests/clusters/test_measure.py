"""A tiny model end to end: places, kinds, files, ranking."""

from __future__ import annotations

import functools
import io
from pathlib import Path

import pytest
from rich.console import Console
from transformers import Qwen3Config

from graphalign.clusters.measure import measure
from graphalign.clusters.report import Clusters, Location, rank_sites, with_sites
from graphalign.errors import BadInputError
from graphalign.ir.files import read_json, write_json
from graphalign.render.clusters_page import render_clusters_page
from graphalign.render.clusters_table import label, render_clusters
from graphalign.render.sites_table import render_table
from graphalign.sites.report import End, Group, Report, Site
from tests.clusters.tiny import TEXT, forward, model


@functools.cache
def llama() -> Clusters:
    return measure(functools.partial(forward, model()), TEXT, prompts="made up")


def kinds(result: Clusters) -> dict[str, list[Location]]:
    out: dict[str, list[Location]] = {}
    for x in result.locations:
        out.setdefault(x.kind, []).append(x)
    return out


def test_every_kind_of_place_of_a_llama_is_found_by_structure() -> None:
    found = {kind: len(xs) for kind, xs in kinds(llama()).items()}
    assert found == {
        "projection": 8,  # q, k, v, o, gate, up, down, and the head
        "attention": 1,
        "normalised": 3,
        "norm output": 3,
        "activation": 1,
        "gated product": 1,
        "rope product": 4,
        "rope sum": 2,
        "residual sum": 2,
        "table": 2,
    }
    layered = [x for x in llama().locations if x.layers]
    assert all(x.layers == (0, 1, 2) and len(x.by_layer) == 3 for x in layered)
    assert len([x for x in llama().locations if not x.layers]) == 5  # the final norm twice, the head, cos and sin


def test_the_papers_pattern_shows_on_random_weights_already() -> None:
    """Residual sums and products with cos are clustered by their format; GEMMs are not."""
    found = kinds(llama())
    assert max(x.corrected for x in found["projection"]) < 0.02
    assert min(x.corrected for x in found["residual sum"]) > 0.1
    assert max(x.corrected for x in found["rope product"]) > 0.1
    for x in llama().locations:
        assert 0 <= x.corrected <= 1
        assert sum(x.histogram) == x.values * max(len(x.layers), 1)
        if x.kind == "table":
            assert x.interval is None  # cos and sin depend on positions alone: every sequence has the same
            assert x.values == 50 * 16
        else:
            assert x.interval is not None
            assert x.interval[0] <= x.interval[1]
        assert x.agreement > 0.5


def test_qk_norms_and_rope_share_a_region_and_keep_their_kinds() -> None:
    result = measure(functools.partial(forward, model(Qwen3Config)), TEXT[:2], prompts="made up")
    found = kinds(result)
    modules = {kind: {x.producer.module.rpartition(".")[2] for x in xs} for kind, xs in found.items()}
    assert modules["norm output"] == {"q_norm", "k_norm", "input_layernorm", "post_attention_layernorm", "norm"}
    assert modules["normalised"] == modules["norm output"]
    assert modules["rope product"] == modules["rope sum"] == {"self_attn"}
    assert all(x.interval is None and x.clustered is None for x in result.locations)


def test_autocast_rounds_elsewhere() -> None:
    import copy

    run = functools.partial(forward, copy.deepcopy(model()).float(), autocast="bfloat16")
    found = kinds(measure(run, TEXT[:1], prompts="made up"))
    assert set(found) <= {"projection", "attention", "activation", "gated product", "rope sum", "norm output", "other"}
    assert "residual sum" not in found
    assert "rope product" not in found


def test_a_model_that_rounds_nothing_is_refused() -> None:
    import copy

    with pytest.raises(BadInputError, match="rounds nothing to BF16 in this regime"):
        measure(functools.partial(forward, copy.deepcopy(model()).float()), TEXT[:1], prompts="made up")


@pytest.mark.parametrize("text", [[], [(1,)]])
def test_no_text_is_refused(text: list[tuple[int, ...]]) -> None:
    with pytest.raises(BadInputError, match="no text"):
        measure(functools.partial(forward, model()), text, prompts="none")


@pytest.mark.parametrize("ids", [(1, 999), (-1, 2), tuple(range(200)) * 3])
def test_prompts_that_do_not_fit_the_model_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(BadInputError, match=r"not one of the model's 256|does not fit into 512 positions"):
        measure(functools.partial(forward, model()), [ids], prompts="bad")


def report(sites: list[Site], group: str = "rope") -> Report:
    groups = (Group(name=group, kind="keep", layers=(0, 1, 2), sites=tuple(sites)),)
    stats = {"sites": 3, "training_paired": 1, "training_ops": 1, "anchors": 1, "check": {"operands": 0}}
    return Report(
        target={}, regime={}, versions={}, model={}, groups=groups, interior=(), leftovers=(), undetermined=(), conflicting=(),
        unpatchable=(), semantic=(), stats=stats,
    )  # fmt: skip


def site(number: int, producer: End, layers: tuple[int, ...]) -> Site:
    return Site(
        id=f"rope.{number}", kind="keep", producer=producer, consumer=producer, training=("bfloat16",), inference=(), layers=layers,
        producer_layers=layers, evidence=(), effect=0.5, reaches=(), count=len(layers),
    )  # fmt: skip


def test_sites_are_ranked_by_the_score_of_their_value_over_their_layers() -> None:
    result = llama()
    low, high = kinds(result)["projection"][-1], kinds(result)["residual sum"][0]
    unknown = high.producer.model_copy(update={"ordinal": 77})
    ranked = rank_sites(report([site(1, low.producer, (0, 1)), site(2, unknown, (0,)), site(3, high.producer, (1,))]), result)
    sites = ranked.groups[0].sites
    assert [s.id for s in sites] == ["rope.3", "rope.1", "rope.2"]
    assert sites[0].clustering == high.by_layer[1]
    assert sites[1].clustering == pytest.approx(sum(low.by_layer[:2]) / 2)
    assert sites[2].clustering is None
    console = Console(width=160, record=True, file=io.StringIO())
    render_table(ranked, console)
    assert f"{high.by_layer[1]:.4f}" in console.export_text()


def test_reports_without_scores_load_and_show_no_column(tmp_path: Path) -> None:
    plain = report([site(1, kinds(llama())["attention"][0].producer, (0,))])
    text = plain.model_dump_json()
    assert '"clustering":null' in text
    (tmp_path / "old.json").write_text(text.replace(',"clustering":null', ""))
    assert read_json(tmp_path / "old.json", Report, kind="sites file") == plain
    console = Console(width=160, record=True, file=io.StringIO())
    render_table(plain, console)
    assert "clustering" not in console.export_text()


def test_the_file_the_table_and_the_page(tmp_path: Path) -> None:
    high = kinds(llama())["residual sum"][0]
    result = with_sites(llama(), report([site(1, high.producer, (0,))]))
    assert [x.sites for x in result.locations if x.sites] == [("rope.1",)]
    write_json(tmp_path / "clusters.json", result, indent=1)
    assert read_json(tmp_path / "clusters.json", Clusters, kind="clusters file") == result
    console = Console(width=160, record=True, file=io.StringIO())
    render_clusters(result, console)
    shown = console.export_text()
    assert all(label(x) in shown for x in result.locations)
    assert "0.038 – 0.47" in shown
    page = render_clusters_page(result)
    assert page.count('class="hist"') == len(result.locations)
    assert page.count("<circle") == len(result.locations)
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")


def test_the_page_escapes_what_comes_from_a_model() -> None:
    x = llama().locations[0]
    evil = x.model_copy(update={"producer": x.producer.model_copy(update={"text": "<b>&", "module": "<i>"}), "kind": "residual sum"})
    page = render_clusters_page(llama().model_copy(update={"locations": (evil,), "model": {"name": "</title><script>"}}))
    assert "<b>" not in page
    assert "<i>" not in page
    assert "<script>" not in page
