"""docs/evidence.md and docs/evidence report the results, the unfavourable ones too, and the figures are drawn from the same
results."""

from __future__ import annotations

import json
import re

import pytest

from bench._evidence import vllm_on_gpu as vllm_on_gpu_section
from bench._evidence.engine_table import engine_table
from bench._evidence.engines import engine, memory_bound
from bench._evidence.multi_turn import conversing
from bench._evidence.readme import with_figures
from bench._evidence.results import Results, newest, source_of
from bench._evidence.services import carried, deciding, served
from bench._evidence.vllm import inside_vllm
from bench._vllm.modes import CLASS, GUESS, NO_HINT
from bench._vllm.modes import FCFS as FCFS_IN_VLLM
from bench._vllm.workers import COUPLED, OWN, PLAIN
from bench.evidence import DOCS, FIGURES, MEASURED, README, draw, main, pages
from bench.figures import draw_regime
from bench.policy import main as bench_policy

SMALL = """
title = "A few short requests"
[workload]
requests = 15
[workload.arrivals]
load = 1.0
[[workload.kinds]]
output = { median = 20, most = 60 }
[[expect]]
of = "fcfs"
at_most = 0.01
[[expect]]
of = "fcfs"
at_most = 9
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return results of one small regime, and of the same regime under another name."""
    folder = tmp_path_factory.mktemp("evidence")
    for name in ("small", "again"):
        (folder / f"{name}.toml").write_text(SMALL)
    regimes = [part for name in ("small", "again") for part in ("--regime", str(folder / f"{name}.toml"))]
    policies = [part for name in ("fcfs", "srpt-length", "oracle", "laps-sd") for part in ("--policy", name)]
    path = folder / "2026-01-01-policy.json"
    options = ("--seeds", "2", "--processes", "1", "--loads", "small:0.5", "--json", str(path))
    bench_policy([*regimes, *policies, *options])
    return path


def changed(path, folder, change):
    """Return the same results with another finding for laps-sd in `small`."""
    results = json.loads(path.read_text())
    for row in results["rows"]:
        if row["kind"] == "policy" and (row["regime"], row["policy"]) == ("small", "laps-sd"):
            change(row)
    other = folder / path.name
    other.write_text(json.dumps(results))
    return orders(Results(other))


def orders(results):
    return pages(results)["evidence/orders.md"]


def section(text, title):
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_pages_are_what_their_results_say():
    texts = pages(Results(newest("policy")), {name: path for name in MEASURED if (path := newest(name))})

    for name, text in texts.items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, "run python -m bench.evidence"
    assert {f"evidence/{path.name}" for path in DOCS.glob("evidence/*")} == set(texts) - {"evidence.md"}


def test_the_figures_of_the_pages_are_drawn_from_their_results():
    text = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("evidence/*.md"))
    shown = re.findall(r"\(\.\./figures/((\w+)[\w-]*\.svg)\)", text)
    assert shown
    assert {path.name for path in FIGURES.glob("policy-*.svg")} == {
        n for n, kind in shown if kind == "policy"
    }
    for name, benchmark in shown:
        source = source_of(newest(benchmark))
        assert source in (FIGURES / name).read_text(encoding="utf-8"), "run python -m bench.evidence"


def test_a_page_that_is_out_of_date_fails_the_check(found, capsys):
    assert main(["--check", "--results", str(found)]) == 1
    said = capsys.readouterr().err
    for name in ("evidence.md", "evidence/orders.md"):
        assert f"docs/{name} is out of date: run python -m bench.evidence" in said


def test_results_that_are_not_there_are_named(tmp_path, capsys):
    assert main(["--check", "--results", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_a_changed_regime_is_called_a_reduced_run_without_goals(found):
    text = orders(Results(found))

    assert "None were judged" in section(text, "Goals")
    assert "**This is a reduced run" in text


def test_goals_are_told_met_and_missed(tmp_path):
    path = tmp_path / "goals-policy.json"
    (tmp_path / "small.toml").write_text(SMALL)

    assert bench_policy(["--regime", str(tmp_path / "small.toml"), "--seeds", "2", "--json", str(path)]) == 1

    goals = section(orders(Results(path)), "Goals")
    assert "3 of 4 are met" in goals
    assert re.search(r"fcfs ≤ 0\.01 \| [\d., \[\]]+ \| \*\*missed\*\* \| no \|", goals)
    assert re.search(r"fcfs ≤ 9\.00 \| [\d., \[\]]+ \| met \| (yes|no) \|", goals)
    assert "levels of `laps-sd` with at least 1.0 % of the machine's time, ≥ 3: met in 1 of 1" in goals


def test_a_gain_and_a_loss_are_told_alike(found, tmp_path):
    def against(ratio):
        def change(row):
            row["ratios"]["srpt-length"] = [ratio, ratio - 0.01, ratio + 0.01]

        return section(changed(found, tmp_path, change), "Where it gains nothing")

    assert "| `small` | `srpt-length` | **0.800** [0.790, 0.810] | faster |" in against(0.8)
    assert "Acceptance gains something against it: `small`" in against(0.8)
    assert "| `small` | `srpt-length` | 1.000 [0.990, 1.010] | no difference shown |" in against(1.0)
    assert "| `small` | `srpt-length` | *1.200* [1.190, 1.210] | slower |" in against(1.2)
    assert "- It loses: `small`" in against(1.2)


def test_the_entry_links_each_section_on_what_was_measured_with_what_ran_and_when(found, tmp_path):
    rows = [{"config": "grpc", "messages_per_s": 1, "tokens_per_message": 3, "delay_p50_s": 0.1, "delay_p99_s": 0.2, "gateway_cpu_share": 0.5, "messages_per_cpu_s": 2, "deliveries_per_cpu_s": 2}]  # fmt: skip
    texts = pages(Results(found), {"gateway": results_of(tmp_path, "gateway", rows, date="2026-01-03")})
    line = "| [What a gateway carries](evidence/system.md#what-a-gateway-carries) | a gateway; the scheduler's messages are synthetic | 2026-01-03 |"
    assert line in texts["evidence.md"]
    assert (
        "- *What a gateway carries.* Messages per second of one process: grpc 1 with 50% of a core"
        in texts["evidence.md"]
    )
    assert "\n## What a gateway carries\n" in texts["evidence/system.md"]


def test_every_figure_of_every_rival_is_on_the_page(found):
    results = Results(found)
    text = orders(results)

    for regime in results.regimes:
        for ratio in results.ours(regime)["ratios"].values():
            assert f"{ratio[0]:.3f}" in section(text, "Against each rival")
    assert found.name in text
    assert str(found.parent) not in text.replace(results.about["command"], ""), "no path of this machine"


def test_the_data_of_a_regime_name_the_predictions_of_its_tenants_and_what_was_learned_before():
    text = pages(Results(newest("policy")))["evidence/simulation.md"]
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.+) \|$", section(text, "On what data"), re.MULTILINE))

    assert rows["chat"].endswith("| σ 0.3")
    assert rows["silent"].endswith("| σ 0.3 (8 of 10 tenants); none (2 of 10 tenants)")
    assert rows["prompts-tenants"].endswith("| words of the prompt")
    assert "| 1500, after 1200 |" in rows["prompts-tenants"]
    assert "| 1500 |" in rows["chat"]


def test_the_paper_is_never_said_to_have_found_what_was_found_here(found):
    paper = section(orders(Results(found)), "The paper's 39 %")

    assert "No figure on this page is the paper's" in paper
    assert "second hand" in paper


def test_figures_are_small_and_the_same_each_time(found, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need the extra `bench`")
    results = Results(found)

    once = draw(results, tmp_path)

    assert [path.name for path in once] == ["policy-overview.svg", "policy-small.svg"]
    for path in once:
        text = path.read_text(encoding="utf-8")
        assert results.source in text
        assert "<dc:date>" not in text
        assert len(text) < 100_000
    draw_regime(tmp_path / "again.svg", results.all, "small", results.source)
    assert (tmp_path / "again.svg").read_bytes() == once[1].read_bytes()
    assert ">laps-sd<" in text.replace("\n", ""), "text is text"


def test_one_regime_and_several_are_drawn_as_asked(found, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need the extra `bench`")
    (tmp_path / "small.toml").write_text(SMALL)
    drawn = tmp_path / "one.png"

    bench_policy(
        ["--regime", str(tmp_path / "small.toml"), "--seeds", "2", "--requests", "5", "--figure", str(drawn)]
    )

    assert drawn.read_bytes().startswith(b"\x89PNG")


def results_of(folder, benchmark, rows, **more):
    path = folder / f"2026-01-01-{benchmark}.json"
    about = {"command": "laps-sd bench something --seeds 2", "date": "2026-01-01", **more}
    path.write_text(json.dumps({"about": about, "rows": rows}))
    return path


def test_what_real_processes_did_stands_beside_what_was_simulated(tmp_path):
    figures = {"mean_s": 2.0, "p99_s": 5.0, "first_token_s": 0.5, "mean_slowdown": 3.0}
    against_fcfs = {
        "ratio_fcfs": 0.5,
        "ratio_fcfs_low": 0.4,
        "ratio_fcfs_high": 0.6,
        "simulated_ratio_fcfs": 0.51,
    }
    silent = {"config": "burst", "hints": "none"}
    goal = {"verdict": True, **silent, "goal": "laps-sd / fcfs", "asked": "≤ 0.45", "found": "0.500"}
    lengths = {"requests": 72, "spread": 1.234, "explained_by_kinds": 0.68, "seen": 0.125}
    known = {"tau": 0.71, "rms": 0.66, "explained": 0.71, "cover": 0.83}
    rows = [
        {"config": "burst", "hints": "0.3", "policy": "fcfs", **figures},
        {"config": "burst", "hints": "0.3", "policy": "laps-sd", **figures, **against_fcfs},
        {**silent, "policy": "laps-sd", **figures, **against_fcfs, "mean_s": 3.0},
        {"lengths": True, "hints": "none", **lengths, **known},
        {"run": True, **silent, "policy": "laps-sd", "seed": 1},
        {**goal, "met": False},
        {**goal, "met": True},
    ]
    text = "\n".join(served(results_of(tmp_path, "serve", rows)))
    assert "| 0.3 | `laps-sd` | 2.00 | 5.00 | 0.50 | 3.0 | **0.500** [0.400, 0.600] | 0.510 | – | – |" in text
    assert "| none | `laps-sd` | 3.00 | 5.00 |" in text
    assert "| 0.3 | `fcfs` | 2.00 | 5.00 | 0.50 | 3.0 | – | – | – | – |" in text
    assert "1 of 2 goals are met. Missed:\n\n- burst, hints none, laps-sd / fcfs: 0.500, asked ≤ 0.45" in text
    assert "`laps-sd bench something --seeds 2`, 2026-01-01" in text
    assert "| none | 0.71 | 0.66 | 71% | 83% |" in text
    assert "the kinds alone explain 68% of the variance of ln(length)" in text


def test_conversations_are_compared_with_the_simulator(tmp_path):
    def run(seed, placement, first_token_s):
        figures = {"first_token_s": first_token_s, "mean_s": 1.5, "hit_share": 0.7}
        simulated = {"first_token_s": 0.3, "mean_s": 1.4, "hit_share": 0.6}
        return {"seed": seed, "placement": placement, **figures, "simulated": simulated}

    goal = {
        "verdict": True,
        "goal": "first_token_s / least-loaded ≤ 1",
        "low": 0.7,
        "high": 0.9,
        "simulated": 0.75,
    }
    rows = [
        run(seed, name, s)
        for seed in (1, 2)
        for name, s in (("least-loaded", 0.4), ("soonest-done", 0.2 * seed))
    ]
    rows += [{**goal, "found": 0.8, "met": True}, {**goal, "found": 1.2, "met": False}]
    text = "\n".join(conversing(results_of(tmp_path, "multi-turn", rows)))
    assert "2 seeds, each with both" in text
    assert "| ours: soonest done | 0.30 [0.30] | 1.50 [1.40] | 70.0% [60.0%] |" in text
    assert "1 of 2 goals are met" in text
    assert "| first_token_s / least-loaded ≤ 1 | 0.800 | 0.700 to 0.900 | 0.750 | met |" in text


def test_what_deciding_costs_is_told_by_size_and_for_the_whole_process(tmp_path):
    core = {
        "workers": 10,
        "queued": 1_000_000,
        "slots": 64,
        "compiled": True,
        "median_ms": 0.5,
        "p99_ms": 0.9,
        "ratio_shortest": 1.2,
    }
    whole = {"config": "scheduler, 100 workers, 5000 queued", "slots": 64, "cpu_ms_per_report": 2.5}
    slow = core | {"queued": 1_000, "median_ms": 1.5, "memory_per_queued_bytes": 1900.0}
    carries = {
        "workers": 8,
        "slots": 64,
        "round_s": 0.05,
        "output_tokens": 250,
        "asked_per_s": 160.0,
        "carried_share": 1.0,
        "p50_ms": 2.0,
        "p90_ms": 4.0,
        "p99_ms": 7.0,
        "scheduler_cpu_ms": 2.25,
        "record_cpu_ms": 0.3,
        "carried": True,
    }
    full = carries | {"workers": 48, "asked_per_s": 960.0, "p99_ms": 120.0, "carried": False}
    rows = [slow, core | {"memory_per_queued_bytes": 1800.4}, whole, carries, full]
    text = "\n".join(deciding(results_of(tmp_path, "control", rows)))
    assert "| 10 | 1,000,000 | 0.50 | 0.90 | 1.20 | 1800 |" in text
    assert "compiled as in the scheduler's image" in text
    assert "1 of 2 rows meet both" in text
    assert "100 workers, 5000 queued" in text
    assert "2.50 ms of CPU time per report." in text
    assert "8 workers is the most of these that were carried" in text
    assert "| 8 | 160 | 100.0% | 2.0 | 4.0 | 7.0 | 2.25 | 0.30 |" in text
    assert "| 48 | 960 | 100.0% | 2.0 | 4.0 | 120.0 | 2.25 | 0.30 |" in text


def test_the_engine_stands_beside_others_and_what_it_misses_is_named(tmp_path):
    def row(config, batch, speed, *, temperature=0.0, identical=1.0, **ratios):
        found = {"config": config, "kind": "mixed", "temperature": temperature, "batch": batch}
        found |= {"tokens_per_cpu_s": speed, "identical": identical}
        for name, (middle, low, high) in ratios.items():
            found |= {
                f"ratio_{name}": middle,
                f"ratio_{name}_low": low,
                f"ratio_{name}_high": high,
            }
        return found

    ours = "ours, speculative"
    rows = [
        row(ours, 1, 700.4, temperature="both", plain=(2.0, 1.8, 2.2), assisted=(2.3, 2.1, 2.5)),
        row(ours, 1, 700.4, plain=(2.1, 1.9, 2.3), vllm=(1.5, 1.45, 1.6)),
        row("ours, look-up", 1, 500.0, vllm=(0.9, 0.8, 1.0)),
        row("vllm, compiled, plain", 1, 1368.5, identical=0.75),
        row("vllm, compiled, plain", 4, 2000.0),
    ]
    about = {"dtype": "float32", "threads": 1, "acceptance": None, "torch": "2.0", "vllm": "0.1"}
    about["cpu"] = "AVX2"
    about |= {"prompt_tokens": {"mixed": [5, 17, 40]}, "tokens": 96}
    about["models"] = {"target": {"parameters": 4_700_000, "bytes": 18_800_000}}
    text = "\n".join(engine(results_of(tmp_path, "engine", rows, **about)))
    assert (
        "Models: target 4.7 M weights (18.8 MB in float32). Prompts have 17 tokens on average, 5 to 40;"
        in text
    )
    assert "| ours, speculative | 700 | – | 100% |" in text
    assert "| vllm, compiled, plain | 1,368 | 2,000 | 75% |" in text
    assert "| vLLM, temperature 0 | 1.50 [1.45, 1.60] | – |" in text
    assert (
        "temperature 0, with up to this number of requests at a time; torch 2.0, vllm 0.1, on a CPU with AVX2."
        in text
    )
    assert "- batch 1: 2.30 [2.10, 2.50] of assisted (goal 2.2)" in text
    assert "4 of 5 goals are met" in text


def test_where_weights_come_from_memory_a_forward_is_compared_with_that_of_vllm(tmp_path):
    mixed = {"kind": "mixed", "temperature": 0.0, "batch": 4, "identical": 0.0}
    plain = {
        "config": "ours, plain",
        "tokens_per_cpu_s": 128.5,
        "forward": 1.12,
        "forward_low": 1.08,
        "forward_high": 1.16,
    }
    drafted = {
        "config": "ours, speculative",
        "tokens_per_cpu_s": 161.5,
        "ratio_plain": 1.26,
        "ratio_plain_low": 1.24,
        "ratio_plain_high": 1.28,
    }
    about = {"dtype": "bfloat16", "threads": 1, "acceptance": 0.7}
    text = "\n".join(
        memory_bound(results_of(tmp_path, "memory-bound", [mixed | plain, mixed | drafted], **about))
    )
    assert "| engine | batch 4 |" in text, "the text is nonsense: whose is the same is not told"
    assert "| ours, speculative | 162 |" in text
    assert "| time of a forward: vLLM's | 1.12 [1.08, 1.16] |" in text
    assert "1 of 2 goals are met" in text
    assert (
        "- mixed at temperature 0.0, batch 4: a forward takes 1.12 [1.08, 1.16] of vllm's (goal 1.1)" in text
    )


def table_results(tmp_path):
    """Return results of the table of engines: two tasks, one of them not run by vLLM."""

    def row(engine, precision, speed, ratio=None, task="batch 1", **more):
        return {
            "model": "qwen2.5-0.5b", "comparison": "bfloat16", "threads": 1, "task": task, "engine": engine, "precision": precision,
            "clock": "cpu", "tokens_per_s": speed, "turns": 6, "not_run": None if speed else "no room",
            "version": "cpu, 1 thread; by torch" if engine == "ours" else "2026", "ratio": ratio, "ratio_low": ratio and ratio - 0.1, "ratio_high": ratio and ratio + 0.1, **more,
        }  # fmt: skip

    rows = [
        row("ours", "bfloat16", 25.0),
        row("ours", "bfloat16", 211.0, task="prefill"),
        row("openvino", "bf16", 20.0, 1.25),
        row("openvino", "bf16", 240.0, 0.88, task="prefill"),
        row("vllm", "bfloat16", None),
        row("vllm", "bfloat16", None, task="prefill"),
        row("ours", "bfloat16", 24.0, comparison="int8"),
        row("openvino", "int8", 27.0, 0.91, threads=2, comparison="int8"),
        row("ours", "bfloat16", 25.0, comparison="threads"),
        row(
            "ours",
            "bfloat16",
            41.0,
            1.62,
            comparison="threads",
            threads=2,
            version="cpu, 2 threads; all layers by the kernels in C",
        ),
    ]
    model = {
        "parameters": 493_961_856,
        "bytes": 987_969_904,
        "prompt_tokens": [16, 16],
        "generated_tokens": 56,
    }
    about = {
        "command": "laps-sd bench engine --table", "date": "2026-01-02", "models": {"qwen2.5-0.5b": model}, "long_prompt_tokens": 1000,
        "threads": [1, 2], "machine_threads": 2, "cpu": "AVX512", "cpu_name": "A CPU", "turns": 6,
    }  # fmt: skip
    return results_of(tmp_path, "engine-table", rows, **about)


def test_engines_by_precision_and_threads_tell_speeds_ratios_and_what_did_not_run(tmp_path):
    text = "\n".join(engine_table(table_results(tmp_path)))

    assert "494.0 M weights, 988 MB in bfloat16; prompts of 16 to 16 tokens, 56 generated" in text
    assert "| 1 thread | engine | batch 1 | prefill |" in text
    assert "| bfloat16 | ours bfloat16 | 25 | 211 |" in text
    assert "| bfloat16 | OpenVINO bf16 | 20 (1.25 [1.15, 1.35]) | 240 (0.88 [0.78, 0.98]) |" in text
    assert "| 2 threads | ours bfloat16 | 41 (1.62 [1.52, 1.72]) |" in text
    assert "\nOpenVINO 2026, vLLM 2026; ours: cpu, 2 threads; all layers by the kernels in C.\n" in text
    assert text.count("- qwen2.5-0.5b, 1 thread: vLLM bfloat16: no room") == 1
    assert "1 of 4 goals are met" in text
    assert "- qwen2.5-0.5b, 1 thread, prefill: 0.88 [0.78, 0.98] of OpenVINO bf16 (goal 0.9)" in text


def test_the_readme_has_the_figures_of_the_newest_results(tmp_path):
    text = README.read_text(encoding="utf-8")
    measured = {name: path for name in MEASURED if (path := newest(name))}
    assert with_figures(text, measured) == text, "run python -m bench.evidence"

    changed = with_figures(text, measured | {"engine-table": table_results(tmp_path)})
    assert "(494 M weights) on 2 threads of A CPU" in changed
    assert "| int8 | OpenVINO int8 | 27 (0.91 [0.81, 1.01]) |" in changed
    assert with_figures(changed, measured) == text, "nothing outside of the comments is touched"
    with pytest.raises(ValueError, match="no place"):
        with_figures("text", measured)


def test_the_page_tells_what_a_gpu_measured_and_apart_from_it_what_is_computed(tmp_path, monkeypatch):
    def row(mode, mean, steps=1000, **more):
        return {
            "measured": "shape", "setting": "burst of 200", "requests": 200, "seed": 1, "mode": mode, "mean": mean, "p50": mean, "p99": 3 * mean, "first_token": 0.5,
            "lasted_s": 8.0, "tokens": 30_000, "steps": steps, "tokens_per_s": 3500.0, "full_tokens_per_s": 6000.0, "scheduler_ms": 0.5, "cpu_ms": 5.0,
            "mixed_steps": 300, "mixed_step_ms": 10.6, "decode_step_ms": 7.0, **more,
        }  # fmt: skip

    worker = {"measured": "worker", "seed": 0, "worker_speed": 1000.0}
    rows = [
        row("vLLM, fcfs", 7.5, setting="burst of 400", requests=400),
        row("LAPS-SD, class", 4.5, setting="burst of 400", requests=400),
        row("vLLM, fcfs", 8.0, setting="burst of 400", measured="shape before"),
        row("LAPS-SD, class", 5.2, setting="burst of 400", measured="shape before"),
        row("vLLM, fcfs", 4.0, setting="load 1.2", measured="one kind"),
        row("LAPS-SD, class", 5.0, setting="load 1.2", measured="one kind"),
        row("vLLM, fcfs", 2.0, measured="quick start"),
        row("LAPS-SD, class", 2.5, measured="quick start"),
        worker | {"mode": "vLLM alone", "same_texts": 100},
        worker | {"mode": "worker, coupled", "same_texts": 99},
        {"measured": "tests", "what": "one.py", "dtype": "bfloat16", "invariant": True, "passed": 8, "skipped": 1, "failed": 0},
    ]  # fmt: skip
    on = {"shape": "8b", "dtype": "bfloat16", "compilation": "NONE", "cuda_graphs": "FULL_DECODE_ONLY", "slots": 64, "residents": 256, "budget": 4096}  # fmt: skip
    about = {"command": "laps-sd bench vllm", "date": "2026-01-02", "machine": "One GPU.", "vllm": "0.32.0", "shape": on | {"compilation": "VLLM_COMPILE", "slots": 32}, "quick_start": on, "quick_start_command": "laps-sd bench vllm --shape-quick-start", "before_command": "laps-sd bench vllm", "before_date": "2026-01-01", "one_kind_command": "laps-sd bench vllm"}  # fmt: skip
    fit = {"computed": "fit", "decode_ms": 6.8, "mixed_ms": 20, "p99": 6.1, "mixed_steps": 100, "decode_steps": 900}  # fmt: skip
    cell = {"computed": "cell", "setting": "burst of 400, 32 places, fast"}
    computed = [
        fit | {"mode": "vLLM, fcfs", "mean": 2.1},
        {"computed": "equal costs", "mode": "vLLM, fcfs", "mean": 2.0},
        {"computed": "equal costs", "mode": "LAPS-SD, class", "mean": 1.5},
        *(cell | {"seed": seed, "mode": "vLLM, fcfs", "mean": 4.0, "p99": 8.0} for seed in (1, 2)),
        *(cell | {"seed": seed, "mode": "LAPS-SD, class", "mean": 2.0, "p99": 9.0} for seed in (1, 2)),
    ]
    times = {"decode_row_ms": 0.015, "mixed_token_ms": 0.03, "fast_mixed_ms": 8.5, "slow_mixed_ms": 20}
    found = results_of(
        tmp_path, "vllm-computed", computed, command="laps-sd bench vllm", date="2026-01-02", **times
    )
    monkeypatch.setattr(vllm_on_gpu_section, "newest", lambda _: found)
    text = "\n".join(vllm_on_gpu_section.vllm_on_gpu(results_of(tmp_path, "vllm-on-gpu", rows, **about)))

    assert "compilation mode VLLM_COMPILE" in text
    assert "**Measured: burst of 400 within 2 s, seed 1; one run of each, so there is no interval.**" in text
    assert "The time was up before the last order ran." in text
    assert (
        "| LAPS-SD, class | 4.50 | **0.60** | 0.65 | **0.50** ±0 % | 13.5 | 0.60 | 0.50 | 8.00 | 1,000 | 300 | 10.6 | 7.0 | 0.50 |"
        in text
    )
    assert "| load 1.2 | LAPS-SD, class | 5.00 | 1.25 |" in text
    assert "a lighter burst without torch.compile, in which no order had a shorter mean than FCFS" in text
    assert "| LAPS-SD, class | 2.50 |" in text
    # (5.0 - 0.5) ms in each of 1,000 steps, of which 900 take 2.5.
    assert "| vLLM, fcfs | 6.8 | 20 | 22 | 2.10 | 2.00 | 6.10 | 6.00 | 100 | 900 |" in text
    assert "would be: LAPS-SD, class 0.75." in text
    assert "| burst of 400, 32 places, fast | 2 |" in text
    assert "**0.50** ±0 % (*1.12* ±0 %)" in text
    assert "99 of 100 texts of the worker" in text
    assert "| one.py | bfloat16 | yes | 8 | 1 | 0 |" in text


def test_a_gateway_carries_so_much_or_too_little(tmp_path):
    row = {"config": "grpc, 2 streams", "messages_per_s": 6000.0, "gateway_cpu_share": 0.5}
    row |= {"messages_per_cpu_s": 12_000.0, "deliveries_per_cpu_s": 12_000.0, "delay_p50_s": 0.001}
    text = "\n".join(carried(results_of(tmp_path, "gateway", [row | {"delay_p99_s": 0.004}])))
    assert "| grpc, 2 streams | 6,000 | 50% | 12,000 | 1.0 ms | 4.0 ms |" in text
    assert "below 20 ms: met." in text
    text = "\n".join(carried(results_of(tmp_path, "gateway", [row | {"delay_p99_s": 0.024}])))
    assert "below 20 ms: missed." in text


def test_inside_vllm_gains_losses_costs_and_the_check_are_on_the_page(tmp_path):
    def run(mode, seed, mean, **more):
        named = {"measured": "steps", "setting": "burst of 80", "seed": seed, "mode": mode, "requests": 80}
        return named | {"mean": mean, "p99": 4 * mean, "in_engine": None} | more

    rows = [run(FCFS_IN_VLLM, seed, 50.0) for seed in (1, 2)]
    rows += [run(NO_HINT, 1, 36.0, in_engine=36.9, same_texts=79), run(NO_HINT, 2, 36.0)]
    rows += [
        {"measured": "speed", "setting": "s", "seed": seed, "mode": mode, "full_speed": speed}
        | {"full_speed_by_parts": speed / 500, "scheduler_share": 0.05}
        for seed in (1, 2)
        for mode, speed in ((FCFS_IN_VLLM, 1000.0), (NO_HINT, 970.0), (CLASS, 990.0), (GUESS, 990.0))
    ]
    rows += [
        {"measured": "cost", "seed": 0, "mode": mode, "core": core, "decision_ms": ms, "schedule_ms": 2 * ms}
        for mode, core, ms in ((FCFS_IN_VLLM, "interpreted", 0.1), (NO_HINT, "compiled", 0.25))
    ]
    rows += [
        {"measured": "worker", "setting": "100 requests", "seed": seed, "mode": mode, "worker_speed": speed}
        | {"same_texts": 99}
        for seed in (1, 2)
        for mode, speed in ((PLAIN, 1000.0), (OWN, 960.0), (COUPLED, 980.0))
    ]
    about = {"vllm": "0.32.0", "slots": 8, "tokens": 200}
    text = "\n".join(inside_vllm(results_of(tmp_path, "vllm", rows, **about)))

    assert text.count("| LAPS-SD, no hint | 36 | 144 | **0.720** [0.720, 0.720] |") == 1
    assert (
        "in 0 of 1 the mean latency was the same, in the others it differed by 2.5% at most; 79 of 80" in text
    )
    assert "| LAPS-SD, no hint | 970 | 5.0% | 0.970 [0.970, 0.970] | 0.970 [0.970, 0.970] |" in text
    assert "| LAPS-SD, no hint | – | – | 0.25 | 0.50 |" in text
    assert "| worker, vLLM's sampler | 960 | 0.960 [0.960, 0.960] | 198 |" in text
    assert "6 of 10 goals are met" in text
    assert "- tokens per CPU second, worker, vLLM's sampler / vLLM alone: 0.960" in text
    assert "- steps, all bursts: LAPS-SD, no hint, mean / vLLM's FCFS 0.720" in text
    assert (
        "- tokens per CPU second while a full batch waits, by parts, LAPS-SD, no hint / FCFS: 0.970" in text
    )
