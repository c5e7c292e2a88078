"""Consistency between deployments, regression between results, gates and verdict.

- `observation`: what a model said, position by position; `collection`: all of one side, saved and read back
- `asker`: log-probabilities by token id from an endpoint, within limits; `collect`, `passes`: the passes of a verify
- `divergence`, `forced`, `reading`: free-running answers, teacher-forced positions, does it read like an answer
- `diagnosis`, `weights`: the cause by behaviour, and by the files; `weight_files`: GGUF and safetensors, opened
- `facts`: what was measured; `verify_result`: SAME, ROUNDING, DRIFT, BROKEN and the evidence; `verify_record`: a file
- `verdict`: from two collections to it, through `drift` (whence), `question_results` (where), `findings` (how bad)
- `bench_run`, `interval`, `gates`, `compare`: two benchmarks through gates; `compare_record`: the record
- `acceptance`, `proofs`: the steps and the one verdict; what was proved of which settings
"""
