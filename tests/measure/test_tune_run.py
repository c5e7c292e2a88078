"""Trials against racks that are golden servers: each is started with its settings and stopped again."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from llamarack.config import Deployment, parse
from llamarack.errors import StartFailed, UsageError
from llamarack.measure.point import Level, PointResult, point_result
from llamarack.measure.settings import Settings
from llamarack.measure.slo import Slo
from llamarack.measure.target import parse_target
from llamarack.measure.tune import Trial
from llamarack.measure.tune_run import Listening, Rack, admitting, measuring, outcome_of, tuned_path
from llamarack.measure.tune_space import Subject
from llamarack.plan.reference import gguf_spec
from tests.measure.golden_server import GoldenServer, models, no_wait, obedient_script, serving
from tests.measure.test_point import JUDGING, measured, steady
from tests.measure.test_tune_space import subject
from tests.plan.shapes import SMOLLM2

DEPLOYMENT = parse(
    "{schema_version: 1, models: [{name: m, path: /m.gguf, limits: {sequences: 4, context_tokens: 2048}}]}"
).deployment


class Racks:
    """Remembers what was started, and refuses batches from 512 on as a card that is too small would."""

    def __init__(self) -> None:
        self.started: list[tuple[int | str, int]] = []
        self.num_running = 0

    @asynccontextmanager
    async def start(self, deployment: Deployment, folder: Path):
        assert folder.parent.is_dir()
        limits = deployment.models[0].groups[0].limits
        self.started.append((limits.batch_tokens, limits.sequences))
        if isinstance(limits.batch_tokens, int) and limits.batch_tokens >= 512:
            raise StartFailed("out of memory on card 0\nits log")
        plain = {"/v1/models": lambda _: models("m")}
        server = GoldenServer(scripts={"m": obedient_script}, between=no_wait, plain=plain)
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        async with serving(server, listener) as port:
            self.num_running += 1
            yield Rack(target=parse_target(f"http://127.0.0.1:{port}"), memory_fraction=self._memory_fraction)
            self.num_running -= 1

    async def _memory_fraction(self) -> float | None:
        assert self.num_running == 1
        return 0.5


def _settings(folder: Path) -> Settings:
    return Settings(
        target=parse_target("http://unset"),
        levels=(Level(concurrency=1), Level(concurrency=2)),
        folder=folder,
        requests=20,
        input_tokens=16,
        output_tokens=4,
        slo=Slo(first_token_s=60.0),
        timeout_s=30.0,
        seed=1,
    )


def point(concurrency: int) -> PointResult:
    return point_result(Level(concurrency=concurrency), [measured(*steady())], JUDGING)


def _subject() -> Subject:
    return subject(DEPLOYMENT)


@pytest.mark.process
async def test_trial_is_started_with_its_settings_measured_and_stopped(tmp_path: Path) -> None:
    racks, steps, results = Racks(), [], []
    listening = Listening(
        on_step=lambda trial, step: steps.append((trial, step)),
        on_result=lambda result, folder: results.append((result, folder)),
    )
    measure = measuring(_subject(), racks.start, _settings(tmp_path), listening)
    own = Trial(is_own=True)
    small = Trial(batch_tokens=256, sequences=4, context_tokens=2048)
    large = replace(small, batch_tokens=512)
    outcomes = [await measure(trial) for trial in (own, small, large)]
    assert racks.started == [("auto", 4), (256, 4), (512, 4)]
    assert racks.num_running == 0
    assert [outcome.trial for outcome in outcomes] == [own, small, large]
    assert outcomes[0].memory_fraction == outcomes[1].memory_fraction == 0.5
    # On a busy machine the client may call its own run invalid; then there is a reason instead of a rate.
    assert all((outcome.goodput_per_s is None) == (outcome.reason is not None) for outcome in outcomes)
    assert [len(outcome.levels) for outcome in outcomes] == [2, 2, 0]
    assert outcomes[2].is_full
    assert outcomes[2].reason == "out of memory on card 0"
    assert not outcomes[0].is_full
    assert steps
    assert (tmp_path / "trial-1" / "result.json").exists()
    assert results[0][1] == tmp_path / "trial-1"


async def test_prompts_that_other_weights_have_no_tokens_for_end_only_their_trial(tmp_path: Path) -> None:
    def start(deployment: Deployment, folder: Path) -> NoReturn:
        raise UsageError("0 of 194 common words are one token to this server")

    both = subject(DEPLOYMENT, None, gguf_spec(SMOLLM2, "Q8_0"))
    measure = measuring(both, start, _settings(tmp_path), Listening())
    outcome = await measure(Trial(sequences=4, weights=1))
    assert (outcome.goodput_per_s, outcome.is_full) == (None, True)
    assert outcome.reason == "0 of 194 common words are one token to this server"
    with pytest.raises(UsageError):  # the user's own options are wrong, and the first trial says so
        await measure(Trial(sequences=4))


def test_level_with_the_most_goodput_speaks_for_the_trial() -> None:
    trial = Trial(sequences=4)
    points = (
        replace(point(1), goodput_requests_per_s=1.0, valid=True, invalid_reasons=()),
        replace(point(4), goodput_requests_per_s=3.0, valid=True, invalid_reasons=()),
        replace(point(8), goodput_requests_per_s=9.0, valid=False, invalid_reasons=("client: late",)),
    )
    outcome = outcome_of(trial, points, None, 0.85)
    assert (outcome.goodput_per_s, outcome.best_level, outcome.reason) == (3.0, 1, None)
    assert outcome.levels[2].goodput_per_s is None
    nothing = outcome_of(trial, points[2:], None, 0.85)
    assert (nothing.goodput_per_s, nothing.reason) == (None, "concurrency 8: client: late")


def test_memory_ceiling_holds_where_there_is_one() -> None:
    points = (replace(point(1), goodput_requests_per_s=1.0, valid=True, invalid_reasons=()),)
    trial = Trial(sequences=4)
    assert not outcome_of(trial, points, 0.85, 0.85).is_full
    over = outcome_of(trial, points, 0.86, 0.85)
    assert over.is_full
    assert over.reason == "over 85% of the fullest card"
    assert not outcome_of(trial, points, 0.93, None).is_full  # vLLM takes its planned fraction


def test_door_turns_nobody_away_while_settings_are_compared(tmp_path: Path) -> None:
    settings = replace(_settings(tmp_path), levels=(Level(concurrency=400),), timeout_s=120.0)
    gateway = admitting(DEPLOYMENT, settings).gateway
    assert (gateway.max_queue_requests, gateway.max_queue_s) == (800, 120.0)
    assert DEPLOYMENT.gateway.max_queue_requests == 256


def test_tuned_file_is_another_one() -> None:
    assert tuned_path(Path("/etc/rack.yaml")) == Path("/etc/rack.tuned.yaml")
    assert tuned_path(Path("/data/m.Q8_0.gguf")) == Path("/data/m.Q8_0.tuned.yaml")
