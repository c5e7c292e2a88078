"""What a comparison of two sides came to: the verdict, the bounds it was made by, and all that was seen.

SAME          equal answers, and log-probabilities within the reference's own noise
ROUNDING      every difference is one that arithmetic in another order makes: no token parts where the reference
              cared, and the distributions are as close as rounding leaves them
DRIFT         a difference in what the model says, of the size that quantisation makes
BROKEN        the candidate reads other tokens, answers garbage where the reference does not, or its distributions
              are further off than any usable quantisation
INCONCLUSIVE  the sides could not be compared closely enough (answers alone, and they differ)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from llamarack.judge.collection import Side
from llamarack.judge.diagnosis import Cause, Shape
from llamarack.judge.divergence import Divergence, FreeRunStats
from llamarack.judge.forced import ForcedStats
from llamarack.judge.reading import ReadingFault
from llamarack.measure.distribution import Interval

SCHEMA_VERSION = 1


class Verdict(StrEnum):
    SAME = "SAME"
    ROUNDING = "ROUNDING"
    DRIFT = "DRIFT"
    BROKEN = "BROKEN"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def exit_code(self) -> int:
        return {Verdict.SAME: 0, Verdict.ROUNDING: 0, Verdict.INCONCLUSIVE: 7}.get(self, 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """`tie_nats`: a preference this small is turned by rounding alone; the measured noise may raise it. A bfloat16
    step near a logit of 18 is 0.125, near-ties were seen to flip at 0.018. `rounding_*`: what arithmetic in another
    order leaves. `broken_*`: beyond the coarsest quantisations in use (2 to 3 bits: KL 0.1 to 0.3, same best token
    85 %). `noise_factor`: how many times the reference's own noise counts as rounding.
    """

    tie_nats: float = 0.02
    rounding_kl: float = 1e-3
    rounding_logprob_p99: float = 0.1
    broken_kl: float = 0.5
    broken_agreement: float = 0.6
    noise_factor: float = 3.0
    faulty_questions: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`measured`, `bound`, `interval`: where it is a number. `verdict`: what this finding alone would mean."""

    code: str
    verdict: Verdict
    message: str
    measured: float | None = None
    bound: float | None = None
    interval: Interval | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One source of difference. `factor`: `again`, `under load`, `after a restart` (the reference against itself),
    `batching` (the candidate under load against itself alone), else what the two sides differ in.
    """

    factor: str
    is_noise: bool
    stats: ForcedStats


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionResult:
    """Evidence for one question. `divergence`: None where only answers were compared."""

    question_id: str
    language: str | None
    is_equal: bool
    divergence: Divergence | None
    reference_text: str | None
    candidate_text: str | None
    faults: tuple[ReadingFault, ...]
    reference_faults: tuple[ReadingFault, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """`noise_nats`: 99th percentile of the reference's log-probability error against itself; None: not measured."""

    schema_version: int = SCHEMA_VERSION
    verdict: Verdict
    reference: Side
    candidate: Side
    questions_name: str
    differing_facts: tuple[str, ...]
    factors: tuple[str, ...]
    bounds: Bounds
    noise_nats: float | None
    tie_nats: float
    free_run: FreeRunStats | None
    forced: ForcedStats | None
    drift: tuple[Drift, ...]
    shape: Shape | None
    causes: tuple[Cause, ...]
    findings: tuple[Finding, ...]
    questions: tuple[QuestionResult, ...]
    notes: tuple[str, ...]
    started_unix_s: float
    finished_unix_s: float
