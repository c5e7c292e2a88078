"""Model + hardware + load -> memory per card and term, speed, placement, explanation. Pure, but for four files.

- `record`: the records; `planner`: `plan_group` (what a configured group needs) and `plan_model` (all ways, ranked)
- `placement`, `ranking`, `estimate`, `limits`, `remarks`: which ways there are, in what order, how far each goes
- `shape`: a model as the formulas see it; `reference`: models made from dimensions
- `llamacpp`, `vllm`, `vllm_shard`: the engines' memory; `*_group`: one replica as a file configures it
- `speed`, `exchange`: the roofline and the all-reduce tables; `calibration`: what runs taught it; `catalogue`: cards
- `engine_data` and `data/`: constants with their sources, by engine version
- `deployment`, `shared`, `gpu_split`, `table`, `explain`: what the command makes of it
- I/O: `machine_file`, `gpu_split` and `calibration` read a file, `dry_run` asks llama.cpp's own tool
"""
