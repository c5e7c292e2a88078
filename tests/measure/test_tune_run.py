"""Trials against racks that are golden servers: each is started with its settings and stopped again."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from llamarack.config import Deployment, parse
from llamarack.errors import StartFailed, UsageError
from llamarack.measure.point import Level
from llamarack.measure.settings import Settings
from llamarack.measure.slo import Slo
from llamarack.measure.target import parse_target
from llamarack.measure.tune import DEFAULTS, Trial
from llamarack.measure.tune_run import Rack, measuring, only_model, space_of, tuned_path
from tests.measure.golden_server import GoldenServer, models, no_wait, obedient_script, serving

DEPLOYMENT = parse(
    "{schema_version: 1, models: [{name: m, path: /m.gguf, limits: {sequences: 4, context_tokens: 2048}}]}"
).deployment


class Racks:
    """Remembers what was started, and refuses batches from 512 on as a card that is too small would."""

    def __init__(self) -> None:
        self.started: list[int | str] = []
        self.num_running = 0

    @asynccontextmanager
    async def start(self, deployment: Deployment):
        limits = deployment.models[0].groups[0].limits
        self.started.append(limits.batch_tokens)
        if isinstance(limits.batch_tokens, int) and limits.batch_tokens >= 512:
            raise StartFailed("out of memory on card 0")
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
        levels=(Level(concurrency=2),),
        folder=folder,
        requests=20,
        input_tokens=16,
        output_tokens=4,
        slo=Slo(first_token_s=60.0),
        timeout_s=30.0,
        seed=1,
    )


@pytest.mark.process
async def test_trial_is_started_with_its_settings_measured_and_stopped(tmp_path: Path) -> None:
    racks, steps = Racks(), []
    on_step = lambda trial, step: steps.append((trial, step))  # noqa: E731
    measure = measuring(DEPLOYMENT, "m", racks.start, _settings(tmp_path), on_step)
    default, small, large = DEFAULTS, Trial(batch_tokens=256, sequences=4), Trial(batch_tokens=512, sequences=4)
    outcomes = [await measure(trial) for trial in (default, small, large)]
    assert racks.started == ["auto", 256, 512]
    assert racks.num_running == 0
    assert [outcome.trial for outcome in outcomes] == [default, small, large]
    assert outcomes[0].memory_fraction == outcomes[1].memory_fraction == 0.5
    # On a busy machine the client may call its own run invalid; then there is a reason instead of a rate.
    assert all((outcome.goodput_per_s is None) == (outcome.reason is not None) for outcome in outcomes)
    assert outcomes[2].goodput_per_s is None
    assert outcomes[2].reason == "out of memory on card 0"
    assert steps
    assert (tmp_path / "trial-1" / "result.json").exists()


def test_space_is_bounded_by_the_files_own_limits() -> None:
    space = space_of(DEPLOYMENT, "m")
    assert (space.sequences, space.max_batch_tokens, space.max_sequences) == (4, 2048, 32)


def test_model_must_be_named_where_the_file_has_several() -> None:
    assert only_model(DEPLOYMENT, None) == "m"
    two = DEPLOYMENT.model_copy(update={"models": [DEPLOYMENT.models[0]] * 2})
    with pytest.raises(UsageError, match="one must be chosen"):
        only_model(two, None)
    with pytest.raises(UsageError, match="not among them"):
        only_model(DEPLOYMENT, "x")


def test_tuned_file_is_another_one() -> None:
    assert tuned_path(Path("/etc/rack.yaml")) == Path("/etc/rack.tuned.yaml")
