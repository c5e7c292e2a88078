"""What becomes of every command in the documents' shell blocks: which test runs it, or why none can.

`tests/docs/test_fates.py` fails for a command that is nowhere in here, and for an entry that no document has any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from tests.docs.reading import Command

# Documents whose commands are all run by one test, which checks that itself.
WHOLE_DOCUMENTS: Mapping[str, str] = {
    "docs/offline.md": "tests/ship/test_documents.py",
    "docs/deploy.md": "tests/ship/test_documents.py",
    "docs/operations-change.md": "tests/test_operations_change.py",
}
# Drawings and forms, no commands: a tree of processes; `llamarack serve [OPTIONS] FILE|MODEL`, made from the code.
NO_COMMANDS = {"ARCHITECTURE.md", "docs/reference/cli.md"}

# Run as they stand by tests/docs/test_commands.py. Exit statuses that a document may lead to on any machine: `check`
# finds what there is, `plan` may say that it does not fit.
QUICK: Mapping[str, set[int]] = {"plan": {0, 4}, "check": {0, 3}, "schema": {0}, "export": {0}, "keys": {0}}
FOLLOWS = 124  # of timeout(1): what ends at Ctrl-C alone is ended so
# Run on a rack of a small model by tests/docs/test_rack_commands.py, in the order of the documents. 6, 7: a few
# requests prove nothing, and the commands say so.
ON_RACK: Mapping[str, set[int]] = {
    "serve": {0},
    "status": {0, FOLLOWS},
    "curl": {0},
    "bench": {0, 7},
    "verify": {0, 6, 7},
    "compare": {0, 6, 7},
    "acceptance": {0, 6, 7},
    "engine list": {0},
    "sha256sum": {0},
}
# Run by tests/docs/test_tune_commands.py: each starts and stops a tiny model many times. 7: a busy machine makes no
# valid run, or nobody keeps the promise.
TUNE: Mapping[str, set[int]] = {"tune": {0, 7}}
# Run by another test, whose file holds these words of it.
ELSEWHERE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "llamarack engine install vllm": ("Makefile", ("engine install vllm --cpu",)),  # make test-vllm
    "llamarack engine install vllm --version 0.32.0": ("tests/engine/test_install.py", ('version="0.31.0"',)),
    "llamarack --version": ("tests/ship/test_distribution.py", ('"--version"',)),
    "make install": (".ci/run", ("make install-dev",)),  # the same rule, with what the tests need besides
    "llamarack engine install llamacpp --cuda": ("tests/engine/test_install_llamacpp.py", ("cuda=True",)),
    "llamarack soak rack.yaml --hours 24 -o soak": ("tests/measure/test_soak.py", ('"--hours", "0.002"', '"-o"')),
    "llamarack engine install llamacpp": ("tests/engine/test_install_llamacpp.py", ("install_llamacpp(",)),
    "llamarack engine install llamacpp --rpc": ("tests/engine/test_install_llamacpp.py", ("rpc=True",)),
    "llamarack node rack.yaml --node-rank 1": ("tests/cli/test_node.py", ('"--node-rank", "1")',)),
    "llamarack node rack.yaml --node-rank 1 --dry-run": (
        "tests/cli/test_node.py",
        ('"--node-rank", "1", "--dry-run"',),
    ),
    "clients/java/build-offline.sh test-compile": ("tests/java/test_java_client.py", ("build-offline.sh",)),
    'java -cp "$(clients/java/build-offline.sh classpath)" io.llamarack.client.LoadTest http://127.0.0.1:8080 64 32': (
        "tests/java/test_java_client.py",
        ("io.llamarack.client.LoadTest",),
    ),
    "promtool check config /etc/prometheus/prometheus.yml": ("tests/test_monitoring.py", ('("check", "config"',)),
}
# Run by tests/docs/test_other_programs.py, in a folder that stands for the reader's machine.
HERE = frozenset(
    {
        "make demo",
        ". .venv/bin/activate",
        "pip install huggingface_hub",
        "pip install modelscope",
        "hf download meta-llama/Llama-2-13b-chat-hf --local-dir /data/models/Llama-2-13b-chat-hf",
        "modelscope download --model shakechen/Llama-2-13b-chat-hf --local_dir /data/models/Llama-2-13b-chat-hf",
        "rsync --partial --progress /mnt/share/llama-2-13b-chat.Q8_0.gguf /data/models/",
        "cp examples/prometheus/prometheus.yml examples/prometheus/llamarack.rules.yml /etc/prometheus/",
        "ggml-rpc-server --host 10.0.0.5 --port 50052",
    }
)
NOT_RUN: Mapping[str, str] = {"make test": "it is what runs these tests"}


def verb(command: Command) -> str:
    """What ON_RACK and QUICK know it by: the subcommand of llamarack, or the program."""
    if command.words[0] != "llamarack":
        return PurePath(command.words[0]).name
    words = command.words[1:]
    if words[0] == "engine":
        return " ".join(words[:2])
    return words[0]


def fates(command: Command) -> list[str]:
    """One for a command that is taken care of."""
    found = []
    if command.document in WHOLE_DOCUMENTS:
        found.append(WHOLE_DOCUMENTS[command.document])
    elif command.text in ELSEWHERE:
        found.append(ELSEWHERE[command.text][0])
    elif command.text in HERE:
        found.append("tests/docs/test_other_programs.py")
    elif command.text in NOT_RUN:
        found.append(NOT_RUN[command.text])
    elif command.words[0] == "llamarack" and verb(command) in QUICK:
        found.append("tests/docs/test_commands.py")
    elif verb(command) in ON_RACK:
        found.append("tests/docs/test_rack_commands.py")
    elif command.words[0] == "llamarack" and verb(command) in TUNE:
        found.append("tests/docs/test_tune_commands.py")
    return found
