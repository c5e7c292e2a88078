"""llamarack: plan, serve, measure and prove a private LLaMA inference service on one server with several GPUs.

Packages, in the order a plan or a request passes through them; imports point only backwards
(`tests/test_layering.py`):

- `errors`, `units`, `config`, `paths`: the error tree, quantities, the deployment file, where files are kept
- `hardware`: what this machine has, and is doing now
- `model`: what a model's files say
- `plan`: model + hardware + load -> memory per card, speed, placement
- `engine`: one adaptor per engine
- `supervise`: owns the processes; carries no user traffic
- `gateway`: the only door; carries user traffic, owns no processes
- `measure`, `judge`, `report`: prove it
- `ship`: bundles for servers without a network, service files, archives for support
- `cli`: one file per command
"""

from llamarack.version import __version__

__all__ = ["__version__"]
