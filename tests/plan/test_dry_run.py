"""llama.cpp's own dry run beside the plan: a real child process that answers as the tool does."""

import sys
from dataclasses import replace
from pathlib import Path

from llamarack.config import Group, Limits
from llamarack.engine.rpc_devices import with_remotes
from llamarack.plan.dry_run import arguments, compared, dry_run, parse
from llamarack.plan.planner import plan_group
from llamarack.plan.reference import gguf_spec
from tests.plan.shapes import LLAMA2_7B, h200, machine

ANSWER = "CUDA0 12603 2048 100 \nHost 250 0 36 \n"  # b11434 on the H200


def _candidate():
    group = Group(limits=Limits(context_tokens=4096, sequences=1))
    return plan_group(gguf_spec(LLAMA2_7B, "F16"), group, machine(h200()), model_name="m")


def _tool(folder: Path, body: str) -> Path:
    tool = folder / "llama-fit-params"
    tool.write_text(f"#!{sys.executable}\nimport os, sys\n{body}\n")
    tool.chmod(0o755)
    return tool


def test_answer_is_read_and_compared_term_by_term(tmp_path):
    body = f"open({str(tmp_path / 'seen')!r}, 'w').write(' '.join(sys.argv[1:]) + os.environ['CUDA_VISIBLE_DEVICES'])"
    tool = _tool(tmp_path, f"{body}\nprint('loading', file=sys.stderr)\nprint({ANSWER!r}, end='')")
    candidate = _candidate()
    rows = dry_run(tool, candidate, Path("/models/m.gguf"))
    assert rows is not None
    assert [row.device for row in rows] == ["CUDA0", "Host"]
    (sentence,) = compared(candidate, rows)
    assert "weights 12.3 GiB, KV 2.0 GiB, compute 100.0 MiB" in sentence
    assert "the upper bound covers it" in sentence
    seen = (tmp_path / "seen").read_text()
    assert "-m /models/m.gguf -c 4096 -np 1 -ngl 999 -b 2048 -ub 512 -ctk f16 -ctv f16" in seen
    assert seen.endswith("0")


def test_answer_above_the_upper_bound_is_said_loudly():
    rows = parse(ANSWER.replace("2048", "20480"))
    assert rows is not None
    assert "MORE than the upper bound" in compared(_candidate(), rows)[0]


def test_tensor_mode_is_compared_as_the_sum_of_its_devices():
    there = machine(h200(0), h200(1))
    group = Group(gpus=[0, 1], split_mode="tensor", limits=Limits(context_tokens=4096, sequences=1))
    candidate = plan_group(gguf_spec(LLAMA2_7B, "F16"), group, there, model_name="m")
    rows = parse("Meta() 12603 2048 100 \nHost 250 0 36 \n")
    assert rows is not None
    (sentence,) = compared(candidate, rows)
    assert "Meta() 14.4 GiB" in sentence
    assert "planned 14.5 GiB: the upper bound covers it" in sentence


def test_tool_that_fails_or_answers_nonsense_gives_none(tmp_path):
    candidate = _candidate()
    assert dry_run(_tool(tmp_path, "sys.exit(1)"), candidate, Path("m")) is None
    assert dry_run(_tool(tmp_path, "print('-c 4096 -ngl 99')"), candidate, Path("m")) is None
    assert dry_run(tmp_path / "not-there", candidate, Path("m")) is None


def test_arguments_carry_the_split():
    group = Group(limits=Limits(context_tokens=4096, sequences=2, kv_dtype="q8_0", kv_unified=True))
    there = machine(h200(0), h200(1))
    two = replace(group, gpus=[0, 1], tensor_split=[0.6, 0.4])
    given = " ".join(arguments(plan_group(gguf_spec(LLAMA2_7B, "F16"), two, there, model_name="m"), Path("m")))
    assert "-c 4096 -np 1" in given  # the tool has no --kv-unified; one sequence has the same pool
    assert given.endswith("-sm layer -ts 0.6,0.4")


def test_rpc_devices_come_before_everything_else():
    address = "127.0.0.1:50052"
    group = Group(limits=Limits(sequences=2), rpc_servers=[f"{address}=24GiB"], gpus=[], gpu_layers=20)
    there = with_remotes(machine(), [(group, None)])
    candidate = plan_group(gguf_spec(LLAMA2_7B, "Q8_0"), group, there, model_name="m")
    given = " ".join(arguments(candidate, Path("m"), [address]))
    assert given.startswith(f"--rpc {address} -m m -c 8192 -np 2 -ngl 20")
