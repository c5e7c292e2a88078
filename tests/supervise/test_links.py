import json

from llamarack.hardware.detect import machine_of
from llamarack.supervise.preparing import links_record
from tests.hardware.recorded import nvml_record


def test_links_of_a_recorded_machine_go_both_ways() -> None:
    links = json.loads(json.dumps(links_record(machine_of(nvml_record()))))
    assert {(link["index"], link["peer_index"]) for link in links} == {(0, 1), (1, 0)}
    assert {(link["kind"], link["lanes"]) for link in links} == {("nvlink", 18)}
    assert all(link["bandwidth_bytes_per_s"] > 4e11 for link in links)
