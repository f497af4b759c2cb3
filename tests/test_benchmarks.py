"""The page of benchmarks says what the saved results say, and the results what the scripts do."""

import json

import pytest

from benchmarks import render, report


def test_the_page_is_what_the_results_render_to():
    page = render.PAGE.read_text(encoding="utf-8")
    assert render.rendered(page) == page, "run `python benchmarks/render.py`"


@pytest.mark.parametrize("script", render.measuring_scripts())
def test_every_figure_that_a_script_tells_of_has_a_direction_or_none_on_purpose(script):
    assert script in render.BETTER
    known = set(render.read_docstring(script)[2])
    for key in " ".join(render.BETTER[script].values()).split():
        assert render.meaning_of(key, dict.fromkeys(known, "said"), script)


@pytest.mark.parametrize("file", sorted(render.RESULTS.glob("*.json")), ids=lambda f: f.stem)
def test_a_result_names_its_machine_its_versions_its_commit_and_its_command(file):
    result = json.loads(file.read_text(encoding="utf-8"))
    release = ".".join(result["versions"]["jax"].split(".")[:2])
    assert file.stem == f"{result['script']}.jax-{release}"
    assert {"jaxlib", "marin-haliax", "numpy"} <= result["versions"].keys()
    assert result["machine"].endswith(" cores") and len(result["commit"]) >= 7
    assert result["command"] == f"python benchmarks/{result['script']}.py --save"
    assert result["figures"]


def test_a_figure_that_no_script_tells_of_is_refused():
    with pytest.raises(ValueError, match="ssd.py has no word for backward_speedup"):
        render.meaning_of("backward_speedup", render.read_docstring("ssd")[2], "ssd")


def test_variants_have_the_meaning_of_what_they_vary():
    meanings = {"speed": "how fast", "held_out_...": "of others"}
    assert render.meaning_of("speed_vs_best", meanings, "x") == "how fast (vs best)"
    assert render.meaning_of("held_out_speed", meanings, "x") == "how fast: of others"


def test_a_saved_result_is_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    about = {"script": "ssd", "versions": {"jax": "0.12.0"}}
    report.save(about, {"forward_speedup": 2.0})
    report.save(about, {"forward_speedup": 3.0})
    assert render.read_results() == {"ssd": [{**about, "figures": {"forward_speedup": 3.0}}]}


def test_code_that_is_not_committed_is_not_measured_for_the_page(monkeypatch):
    monkeypatch.setattr(report, "_git", lambda *words: " M stackax/_jax.py")
    with pytest.raises(SystemExit, match="stackax/_jax.py"):
        report.about_this_run("ssd")
