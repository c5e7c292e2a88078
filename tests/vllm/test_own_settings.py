"""What tune calls vLLM's own settings is what this vLLM says of itself."""

import json
import subprocess
from pathlib import Path

import pytest

from llamarack.config import Group
from llamarack.measure.engine_defaults import own_limits

pytestmark = pytest.mark.vllm
_ASK = """
import json, sys
from vllm.config import CacheConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
tokens, sequences = EngineArgs.get_batch_defaults(int(sys.argv[1]))
server = UsageContext.OPENAI_API_SERVER
print(json.dumps([tokens[server], sequences[server], CacheConfig().gpu_memory_utilization]))
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_own_settings_are_those_of_the_installed_version(vllm_python: Path, ranks: int) -> None:
    command = [str(vllm_python), "-c", _ASK, str(ranks)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    batch_tokens, sequences, fraction = json.loads(said.splitlines()[-1])
    own = own_limits(Group(engine="vllm", gpus=[], tensor_parallel=ranks), [], 4096)
    assert (own.batch_tokens, own.sequences, own.gpu_memory_fraction) == (batch_tokens, sequences, fraction)
