"""A deployment file that is wrong: the sentence names the key as it was written, its line, and what to type."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarack.config import Deployment, from_value, load, parse, to_yaml
from llamarack.errors import ConfigError

FLAT = "models:\n  - name: m\n    path: m.gguf\n"
GROUPS = "models:\n  - name: m\n    path: m.gguf\n    groups:\n      - engine: llamacpp\n"


def _refused(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(text, source=Path("rack.yaml"))
    return caught.value


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("models: [", "`rack.yaml` line 1: ", "indentation and quotes"),
        ("- a\n", "`rack.yaml` holds no mapping", "start with `schema_version: 1`"),
        (FLAT + "models: []\n", "line 4: key `models` is given twice", "leave one of them"),
        (FLAT + "1: 2\n", "key `1` is not a word", "indentation"),
        ("schema_version: 2\n" + FLAT, "schema_version: this llamarack reads version 1, `2` given", "CHANGELOG"),
        (FLAT + "gatway: {}\n", "rack.yaml line 4: `gatway` is not a known key", "did you mean `gateway`?"),
        (
            FLAT + "    tensor_paralel: 2\n",
            "line 4: `models[0].tensor_paralel` is not",
            "did you mean `tensor_parallel`?",
        ),
        (FLAT + "    zzz: 2\n", "`models[0].zzz` is not a known key", "known keys here: chat_template, "),
        ("models:\n  - name: m\n", "line 2: `models[0].path` is missing", "add `path:`"),
        (
            FLAT + "    limits: {sequences: 0}\n",
            "line 4: `models[0].limits.sequences`: ",
            "sequences at once per replica",
        ),
        (
            FLAT + "    replicas: two\n",
            'line 4: `models[0].replicas`: should be a valid integer, "two" given',
            "copies",
        ),
        (GROUPS + "        replicas: 0\n", "line 6: `models[0].groups[0].replicas`: ", "copies"),
        (GROUPS + "    engine: vllm\n", "`models[0].engine`: stands beside `groups`", "move it into a group"),
        (FLAT + "    tensor_split: [1, 3]\n", "line 4: `models[0].tensor_split`: must sum to 1", "[0.25, 0.75]"),
        (FLAT + "    replicas: 2\n    gpus: [0, 1]\n", "2 replicas need 2 lists of cards, 1 given", "gpus: [[0], [1]]"),
        (
            FLAT + "gateway: {tls_cert: c.pem}\n",
            "`gateway.tls_key`: tls_cert and tls_key go together",
            "/path/to/file.pem",
        ),
        (FLAT + "gateway: {host: 0.0.0.0}\n", "`gateway.host`: `0.0.0.0` is not loopback", "insecure: true"),
        (FLAT + "supervise: {webhook: here}\n", "`supervise.webhook`: `here` is not an http", "webhook: http://"),
        (FLAT + "    replicas: 99999\n", "`models[0].replicas`: should be less than or equal to 256", "copies"),
        (FLAT + "    env: {A: 1}\n", "`models[0].env.A`: should be text, 1 given", 'write it in quotes: "1"'),
        (FLAT.replace("name: m", "name: 模型"), "`models[0].name`: has characters that it", "a letter"),
        ("models: [3]\n", "`models[0]`: should be a mapping of keys to values, 3 given", ""),
        ("models:\n  - {name: m, path: 3}\n", "`models[0].path`: should be a path, 3 given", "model file"),
        (FLAT + FLAT.partition("\n")[2], "`models`: the name `m` is given twice", ""),
        (FLAT + "    limits: {sequences: 0, threads: 0}\n", "`models[0].limits.", "1 more fault after this one"),
    ],
)
def test_fault_names_key_line_and_what_to_type(text: str, message: str, hint: str) -> None:
    error = _refused(text)
    assert message in str(error)
    assert hint in (error.hint or "")
    for word in ("Input", "constrained", "literal[", "groups[0].tensor"):  # pydantic's, and what nobody wrote
        assert word not in str(error)


def test_paths_are_relative_to_the_file_and_must_be_there(tmp_path: Path) -> None:
    file = tmp_path / "racks" / "rack.yaml"
    file.parent.mkdir()
    (file.parent / "llama-2-13b.gguf").touch()
    file.write_text("models:\n  - name: m\n    path: llama-2-13.gguf\n")
    with pytest.raises(ConfigError, match=r"rack\.yaml line 3: `models\[0\]\.path`: .* is not there") as caught:
        load(file)
    assert caught.value.hint == f"did you mean `{file.parent / 'llama-2-13b.gguf'}`?"
    file.write_text(
        "models: [{name: m, path: llama-2-13b.gguf, groups: [{engine_binary: bin/llama-server}]}]\n"
        "gateway: {api_keys_file: keys.yaml}\n"
    )
    with pytest.raises(ConfigError, match=r"`models\[0\]\.groups\[0\]\.engine_binary`") as caught:
        load(file)
    assert caught.value.hint == f"folder `{file.parent / 'bin'}` is not there either"
    (file.parent / "bin").mkdir()
    (file.parent / "bin" / "llama-server").touch()
    with pytest.raises(ConfigError, match=r"`gateway\.api_keys_file`"):
        load(file)
    (file.parent / "keys.yaml").touch()
    loaded = load(file)
    assert loaded.deployment.models[0].path == file.parent / "llama-2-13b.gguf"
    assert loaded.deployment.gateway.api_keys_file == file.parent / "keys.yaml"
    assert loaded.origin("gateway.api_keys_file") == "rack.yaml:2"
    assert loaded.origin("gateway.port") == "default"
    with pytest.raises(ConfigError, match="is not there") as caught:
        load(tmp_path / "none.yaml")
    assert "llamarack plan MODEL -o rack.yaml" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "text",
    [
        FLAT + "    replicas: 2\n    gpus: [[0], [1]]\n    limits: {sequences: 4}\n",
        GROUPS + "      - engine: vllm\n        path: m-hf\n        tensor_parallel: 2\n",
        GROUPS + "        path: other.gguf\n",  # `path` is a key of the model as well: it cannot be written flat
        FLAT + "gateway: {port: 1, heartbeat: {style: 'off'}}\nsupervise: {restarts: {max: 0}}\n",
    ],
)
def test_written_file_is_read_back_as_it_was(text: str) -> None:
    deployment = parse(text).deployment
    assert isinstance(deployment, Deployment)
    assert parse(to_yaml(deployment)).deployment == deployment


def test_value_of_a_program_gets_every_check_of_a_file(tmp_path: Path) -> None:
    value = {"models": [{"name": "m", "path": str(tmp_path / "m.gguf")}]}
    assert from_value(value).models[0].name == "m"
    with pytest.raises(ConfigError, match="replicaz") as refused:
        from_value({"models": [{"name": "m", "path": "m.gguf", "replicaz": 2}]})
    assert "replicas" in (refused.value.hint or refused.value.message)
