"""Consistency between deployments, regression between results, gates and verdict.

- `observation`: what a model said, position by position; `collection`: all of one side, saved and read back
- `asker`: log-probabilities by token id from an endpoint, within limits; `collect`, `passes`: the passes of a verify
- `divergence`, `forced`, `reading`: free-running answers, teacher-forced positions, does it read like an answer
- `diagnosis`, `weights`: the cause by behaviour, and by the files
- `facts`: what was measured; `verdict`: SAME, ROUNDING, DRIFT, BROKEN; `verify_record`: the record
- `bench_run`, `interval`, `gates`, `compare`: two benchmarks through gates; `compare_record`: the record
- `acceptance`, `proofs`: the steps and the one verdict; what was proved of which settings
"""
