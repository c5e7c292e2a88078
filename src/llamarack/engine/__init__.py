"""One adaptor per engine: how it is started, how it is read, why it died.

- `adaptor`, `device_memory`: the contract and its records
- `llamacpp`, `llamacpp_worker`, `llamacpp_options`, `llamacpp_log`: llama.cpp in a process of its own
- `llamacpp_binary`, `rpc_devices`, `builds`: any llama-server, its devices and those it reaches, for the planner
- `llamacpp_build`, `llamacpp_proof`, `probe_model`, `install_llamacpp`: llama.cpp compiled here, and proven
- `command_line`: options in the spelling of the installed version
- `vllm`, `vllm_options`, `vllm_help`, `vllm_faults`, `vllm_memory`: vLLM in an environment of its own
- `transformers`, `transformers_worker`: the reference, plain PyTorch in a process of its own
- `installed`, `install`: engines in environments of their own, found and made
- `chat_template`: templates by name
"""

from llamarack.engine.adaptor import Adaptor
from llamarack.engine.llamacpp import LlamaCpp
from llamarack.engine.transformers import Transformers
from llamarack.engine.vllm import Vllm

ADAPTORS: dict[str, Adaptor] = {"llamacpp": LlamaCpp(), "transformers": Transformers(), "vllm": Vllm()}
