"""What the clients of a rack see while one process of an engine is killed: kill(url, ...) keeps N streams running.

Every client asks again as soon as it has its answer, for `after_s` before and `for_s` after `kill -9` of the youngest
process of the first replica (a rank, where the engine has several). Each request ends in one of: `whole` (finish reason
and the end of the stream were there), `named` (an error said so, in the stream or as a status), `cut` (the stream ended
and nothing said why), `hung` (nothing for `silence_s`). The last two must not happen.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from typing import Any
from urllib.parse import urlsplit


def one_request(url: str, model: str, output_tokens: int, silence_s: float) -> dict[str, Any]:
    """How one streamed request ended, and when: {end, status, first_s, tokens, error} in seconds of the clock."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=silence_s)
    body = {
        "model": model,
        "prompt": "Describe how a warehouse counts its stock.",
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    record: dict[str, Any] = {"sent": time.monotonic(), "end": "cut", "status": None, "first": None, "events": 0}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        record["status"] = response.status
        if response.status != 200:
            record |= {"end": "named", "error": response.read(500).decode(errors="replace")}
        else:
            finished = False
            for line in response:
                data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    record["end"] = "whole" if finished else "cut"
                elif data:
                    event = json.loads(data)
                    if "error" in event:
                        record |= {"end": "named", "error": json.dumps(event["error"])[:500]}
                        break
                    record["events"] += 1
                    record["first"] = record["first"] or time.monotonic()
                    finished = finished or any(choice.get("finish_reason") for choice in event.get("choices", []))
    except TimeoutError:
        record["end"] = "hung"
    except (OSError, http.client.HTTPException) as error:
        record["error"] = repr(error)
    finally:
        connection.close()
    return record | {"ended": time.monotonic()}


def kill(url: str, status_of: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Streams before, during and after the kill; `status_of()` is the rack's status record.

    `options`: streams, output_tokens, after_s, for_s, silence_s. Times of the result are seconds after the kill.
    """
    replica = status_of()["models"][0]["replicas"][0]
    model, victim = status_of()["models"][0]["name"], replica["pids"][-1]
    over, results, lock = threading.Event(), [], threading.Lock()

    def client() -> None:
        while not over.is_set():
            record = one_request(url, model, options["output_tokens"], options["silence_s"])
            with lock:
                results.append(record)
            if record["end"] != "whole":
                over.wait(0.5)  # a client that is refused does not hammer

    threads = [threading.Thread(target=client) for _ in range(options["streams"])]
    for thread in threads:
        thread.start()
    time.sleep(options["after_s"])
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    seen_down = back = None
    while time.monotonic() < killed + options["for_s"]:
        time.sleep(0.1)
        state = status_of()["models"][0]["replicas"][0]
        now = time.monotonic() - killed
        if state["state"] != "ready":
            seen_down = now if seen_down is None else seen_down
        elif seen_down is not None and back is None:
            back = now
    over.set()
    for thread in threads:
        thread.join()
    after = status_of()["models"][0]["replicas"]
    left = [pid for pid in replica["pids"] if os.path.exists(f"/proc/{pid}")]
    return {
        "options": options,
        "killed_pid_of": replica["id"],
        "seen_down_s": seen_down,
        "ready_again_s": back,
        "restarts": [each["restarts"] for each in after],
        "states": [each["state"] for each in after],
        "processes_left": left,
        "before_the_kill": _ends([r for r in results if r["ended"] < killed]),
        "across_the_kill": _ends([r for r in results if r["sent"] < killed <= r["ended"]]),
        "sent_after_it": _ends([r for r in results if r["sent"] >= killed]),
        "longest_end_after_kill_of_running_s": max(
            (r["ended"] - killed for r in results if r["sent"] < killed <= r["ended"]), default=None
        ),
        "first_whole_after_s": min(
            (r["ended"] - killed for r in results if r["sent"] >= killed and r["end"] == "whole"), default=None
        ),
        "errors": sorted({f"{r['status']}: {r['error']}" for r in results if "error" in r})[:5],
    }


def _ends(records: list[dict[str, Any]]) -> dict[str, int]:
    ends = [record["end"] for record in records]
    return {end: ends.count(end) for end in ("whole", "named", "cut", "hung")}
