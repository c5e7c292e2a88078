"""Every way people write a base URL."""

import pytest

from llamarack.errors import UsageError
from llamarack.measure.target import parse_target


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/completions"])
def test_url_with_or_without_v1_is_the_same_base(suffix: str) -> None:
    target = parse_target(f"http://host:8000/rack{suffix}")
    assert (target.host, target.port, target.base_path, target.host_header) == ("host", 8000, "/rack", "host:8000")


def test_default_ports_and_tls_follow_the_scheme() -> None:
    assert (parse_target("https://host").port, parse_target("https://host").host_header) == (443, "host")
    assert parse_target("https://host").is_tls
    assert parse_target("http://host").port == 80
    assert parse_target("http://[::1]:8080/v1").host_header == "[::1]:8080"


@pytest.mark.parametrize(
    "url", ["unix:///run/rack/g.sock", "unix:///run/rack/g.sock/v1", "http+unix://%2Frun%2Frack%2Fg.sock"]
)
def test_unix_socket_path_is_taken_from_the_url(url: str) -> None:
    assert parse_target(url).unix_path == "/run/rack/g.sock"


@pytest.mark.parametrize(
    "url",
    ["host:8080", "ftp://host", "http://", "http://host:99999", "http://u:p@host", "http://host?x=1", "unix://run/x"],
)
def test_unusable_url_is_refused_with_a_form_to_type(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_target(url)
    assert caught.value.hint
    assert "u:p" not in caught.value.message
