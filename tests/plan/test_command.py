"""`llamarack plan` from the outside: what it prints, writes and exits with."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from llamarack import config
from llamarack.cli.plan import plan as plan_command
from llamarack.errors import ConfigError, DoesNotFit, UsageError
from llamarack.plan.planner import plan_group
from llamarack.units import GIB
from tests.plan.files import sparse_gguf, sparse_safetensors
from tests.plan.shapes import LLAMA2_7B, LLAMA2_13B, SMOLLM2

app = typer.Typer()
app.command()(plan_command)
runner = CliRunner()


def run(*arguments: object, raises: type[Exception] | None = None):
    result = runner.invoke(app, [str(one) for one in arguments], env={"COLUMNS": "220"})
    if raises is None:
        assert result.exception is None, result.exception
        assert result.exit_code == 0
    else:
        assert isinstance(result.exception, raises), result.exception
    return result


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "13b": sparse_safetensors(folder / "llama-2-13b-hf", LLAMA2_13B),
        "7b-q8": sparse_gguf(folder / "llama-2-7b.Q8_0.gguf", LLAMA2_7B, "Q8_0"),
        "7b-q4": sparse_gguf(folder / "llama-2-7b.Q4_0.gguf", LLAMA2_7B, "Q4_0"),
        "small": sparse_gguf(folder / "small.gguf", SMOLLM2, "Q8_0"),
    }


def test_table_names_cards_terms_ways_and_limits(files):
    text = run(files["7b-q8"], "--gpus", "RTX 4090 x2").stdout
    for words in (
        "NVIDIA GeForce RTX 4090",
        "weights",
        "kv",
        "context",
        "2 replicas",
        "tokens/s",
        "as `bench` drives it",
        "limits of the first",
    ):
        assert words in text


def test_refusal_exits_4_and_says_what_would_do(files):
    result = run(files["13b"], "--gpus", "RTX 4090", raises=DoesNotFit)
    error = result.exception
    assert isinstance(error, DoesNotFit)
    assert error.exit_code == 4
    assert "`llama-2-13b-hf` at 4096 tokens x 5 does not fit" in error.message
    assert "W8A8" in (error.hint or "")
    assert "nearest, does not fit" in result.stdout


def test_json_is_the_record_with_stable_keys(files):
    record = json.loads(run(files["13b"], "--gpus", "RTX 4090 x2", "--json").stdout)
    assert record["schema_version"] == 1
    best = record["candidates"][0]
    assert {"engine", "replicas", "tensor_parallel", "pipeline_parallel", "split_mode", "tensor_split", "fits"} <= {
        *best
    }
    assert {"tight", "reasons", "cards", "max_sequences", "max_context_tokens", "predicted"} <= {*best}
    assert (best["tensor_parallel"], best["tight"]) == (2, True)
    assert best["cards"][0]["total_bytes"] == sum(best["cards"][0]["terms"].values())
    assert {*best["predicted"]} == {"first_token_s", "per_token_s", "tokens_per_s"}


def test_json_of_a_refusal_is_still_the_record(files):
    result = run(files["13b"], "--gpus", "RTX 4090", "--json", raises=DoesNotFit)
    assert json.loads(result.stdout)["candidates"][0]["fits"] is False


def test_written_file_is_what_serve_reads_and_plans_to_the_same(files, tmp_path):
    from llamarack.model.read import read_model
    from llamarack.plan.catalogue import machine_of

    path = tmp_path / "rack.yaml"
    shown = json.loads(run(files["13b"], "--gpus", "RTX 4090 x2", "--json", "-o", path).stdout)["candidates"][0]
    (model,) = config.load(path).deployment.models
    (group,) = model.groups
    assert (group.engine, group.tensor_parallel, group.gpus) == ("vllm", 2, [[0, 1]])
    again = plan_group(read_model(model.path), group, machine_of("RTX 4090 x2"), model_name=model.name)
    assert again.fits
    assert [card.total_bytes for card in again.cards] == [card["total_bytes"] for card in shown["cards"]]


def test_coarser_file_becomes_a_fallback(files, tmp_path):
    path = tmp_path / "rack.yaml"
    run(files["7b-q4"], "--also", files["7b-q8"], "--gpus", "RTX 4090", "-o", path)
    (model,) = config.load(path).deployment.models
    assert model.path == files["7b-q8"]
    assert model.fallbacks == [files["7b-q4"]]


def test_nothing_is_written_where_nothing_fits(files, tmp_path):
    path = tmp_path / "rack.yaml"
    run(files["13b"], "--gpus", "T4", "-o", path, raises=DoesNotFit)
    assert not path.exists()


def test_explain_shows_formulas_refused_ways_and_the_sum(files):
    text = run(files["13b"], "--gpus", "RTX 4090 x2", "--explain").stdout
    assert "every matrix cut 2 ways" in text
    assert "= 21.9 GiB, at most" in text
    assert "40 heads do not divide by 3" in run(files["13b"], "--gpus", "RTX 4090 x3", "--explain").stdout


def test_model_of_another_architecture_is_planned_with_a_word_about_it(files, tmp_path):
    folder = sparse_safetensors(tmp_path / "mamba", LLAMA2_13B)  # a copy would not be sparse
    config_file = folder / "config.json"
    config_file.write_text(config_file.read_text().replace('"llama"', '"mamba"'))
    assert "architecture `mamba`" in run(folder, "--gpus", "A100-80").stdout
    assert "architecture" not in run(files["13b"], "--gpus", "A100-80").stdout


def test_budget_table_has_three_sizes_and_three_precisions():
    text = run("--table", "llama2", "--concurrency", "1").stdout
    assert text.count("LLaMA-2-7B") == text.count("LLaMA-2-13B") == text.count("LLaMA-2-70B") == 6
    table = json.loads(run("--table", "llama2", "--json", "--concurrency", "1").stdout)
    verdicts = {
        (row["model"], row["precision"], row["engine"]): dict(zip(table["cards"], row["verdicts"], strict=True))
        for row in table["rows"]
    }
    assert verdicts["LLaMA-2-13B", "fp16", "vllm"]["RTX 4090"] == "no"
    assert verdicts["LLaMA-2-13B", "fp16", "vllm"]["RTX 4090 x2"] == "fits"
    assert verdicts["LLaMA-2-7B", "INT4", "llamacpp"]["RTX 4090"] == "fits"
    assert verdicts["LLaMA-2-70B", "INT4", "llamacpp"]["A100-80"] == "fits"


def test_budget_table_of_a_server_says_which_way_and_how_fast():
    words = ("--table", "llama2", "--gpus", "RTX 4090 x2", "--context", "2048", "--concurrency", "4")
    text = run(*words).stdout
    assert text.startswith("RTX 4090 x2  2,048 tokens x 4 at once")
    assert "vllm, TP 2 on cards 0,1" in text
    table = json.loads(run(*words, "--json").stdout)
    assert table["cards"] == ["RTX 4090 x2"]
    rows = {(row["model"], row["precision"], row["engine"]): row for row in table["rows"]}
    assert rows["LLaMA-2-70B", "fp16", "vllm"]["best"] == [None]
    (best,) = rows["LLaMA-2-7B", "INT8", "llamacpp"]["best"]
    assert best["tokens_per_s"] > 0
    assert best["max_sequences"] >= 4


@pytest.mark.parametrize("option", [("--concurrency", 2), ("--context", 2048), ("--kv-dtype", "q8_0")])
def test_budget_table_obeys_the_load(option):
    plain, changed = (json.loads(run("--table", "llama2", "--json", *words).stdout)["rows"] for words in ((), option))
    assert [row["terms"]["kv_bytes"] for row in plain if row["engine"] == "llamacpp"] > [
        row["terms"]["kv_bytes"] for row in changed if row["engine"] == "llamacpp"
    ]


def test_budget_table_shows_what_a_load_asks_for_beyond_any_card():
    rows = json.loads(run("--table", "llama2", "--json", "--concurrency", "64").stdout)["rows"]
    seven = [row["terms"]["kv_bytes"] for row in rows if row["model"] == "LLaMA-2-7B"]
    assert all(128 * GIB <= kv < 129 * GIB for kv in seven), seven


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--table", "llama2", "-o", "rack.yaml"), "`-o` says nothing with --table"),
        (("m.gguf", "--table", "llama2"), "`MODEL|FILE` says nothing with --table"),
        (("rack.yaml", "--concurrency", 9), "`--concurrency` says nothing with a deployment file"),
        (("rack.yaml", "--goal", "latency"), "`--goal` says nothing with a deployment file"),
        (("--from", "gpu-split.yaml", "--context", 9), "`--context` says nothing with --from"),
    ],
)
def test_option_that_would_say_nothing_is_refused(words, named):
    error = run(*words, raises=UsageError).exception
    assert str(error) == named
    assert error.hint


def test_articles_file_is_planned_and_written(files, tmp_path):
    split, path = tmp_path / "gpu-split.yaml", tmp_path / "rack.yaml"
    split.write_text(f"model_path: {files['7b-q8']}\nsplit_ratio: [0.7, 0.3]\nbatch_size: 128\nthreads: 8\n")
    result = run("--from", split, "--gpus", "RTX 4090 x2", "--json", "-o", path)
    (candidate,) = json.loads(result.stdout)["candidates"]
    assert candidate["tensor_split"] == [0.7, 0.3]
    assert candidate["cards"][0]["terms"]["weights_bytes"] > 2 * candidate["cards"][1]["terms"]["weights_bytes"]
    (group,) = config.load(path).deployment.models[0].groups
    assert (group.tensor_split, group.limits.threads, group.limits.batch_tokens) == ([0.7, 0.3], 8, 128)


def test_file_of_two_models_is_planned_on_shared_cards(files, tmp_path):
    path, out = tmp_path / "two.yaml", tmp_path / "out.yaml"
    path.write_text(
        "schema_version: 1\nmodels:\n"
        f"  - {{name: chat, path: {files['7b-q8']}, gpus: [0], limits: {{sequences: 2}}}}\n"
        f"  - {{name: small, path: {files['small']}, gpus: [0], limits: {{sequences: 2}}}}\n"
    )
    plans = json.loads(run(path, "--gpus", "RTX 4090", "--json", "-o", out).stdout)["plans"]
    first, second = (plan["candidates"][0] for plan in plans)
    assert second["cards"][0]["memory_free_bytes"] == (
        first["cards"][0]["memory_free_bytes"] - first["cards"][0]["total_high_bytes"]
    )
    assert [model.name for model in config.load(out).deployment.models] == ["chat", "small"]


def test_models_that_do_not_fit_together_are_refused(files, tmp_path):
    path = tmp_path / "two.yaml"
    group = "gpus: [0], limits: {sequences: 4}"
    path.write_text(
        "schema_version: 1\nmodels:\n"
        f"  - {{name: a, path: {files['7b-q8']}, {group}}}\n  - {{name: b, path: {files['7b-q8']}, {group}}}\n"
    )
    error = run(path, "--gpus", "RTX 4090", raises=DoesNotFit).exception
    assert isinstance(error, DoesNotFit)
    assert "`b`" in error.message


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ([], UsageError, "`MODEL` is missing"),
        (["{13b}", "--engine", "llamacpp"], UsageError, "reads gguf"),
        (["{13b}", "--kv-dtype", "f8"], UsageError, "no `f8`"),
        (["{13b}", "--gpus", "RTX 40"], UsageError, "no card"),
        (["{13b}", "--context", "100", "--input-tokens", "100", "--output-tokens", "1"], UsageError, "--context"),
        (["/not/there.yaml"], ConfigError, "is not there"),
    ],
)
def test_bad_arguments_are_refused_in_words(files, arguments, error, words):
    given = [argument.format(**files) for argument in arguments]
    if "--gpus" not in given:
        given += ["--gpus", "H200"]
    assert words in str(run(*given, raises=error).exception)


def test_calibration_of_this_card_and_engine_scales_the_prediction(files, tmp_path):
    path = tmp_path / "calibration.json"

    def speed(*more: object) -> dict[str, float]:
        arguments = (files["7b-q8"], "--gpus", "H200", "--engine", "llamacpp", "--json", *more)
        found: dict[str, float] = json.loads(run(*arguments).stdout)["candidates"][0]["predicted"]
        return found

    record = {"card": "NVIDIA H200", "engine": "llamacpp", "engine_version": "11434", "per_token_factor": 2.0}
    path.write_text(json.dumps({"schema_version": 1, "calibrations": [record]}))
    assert speed("--calibration", path)["per_token_s"] == pytest.approx(2 * speed()["per_token_s"])
    path.write_text(json.dumps({"schema_version": 1, "calibrations": [{**record, "card": "NVIDIA L4"}]}))
    assert speed("--calibration", path) == speed()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("{}", "schema_version"),
        ('{"schema_version": 1, "calibrations": [{"card": "x"}]}', "calibrations.0.engine"),
        (
            '{"schema_version": 1, "calibrations": [{"card": "x", "engine": "vllm", "engine_version": "1", '
            '"per_token_factor": 0}]}',
            "factors are 0.05 to 20, 0",
        ),
    ],
)
def test_bad_calibration_file_is_refused(files, tmp_path, text, words):
    path = tmp_path / "calibration.json"
    path.write_text(text)
    result = run(files["small"], "--gpus", "H200", "--calibration", path, raises=UsageError)
    assert words in str(result.exception)
