"""What is refused before anything is sent, and what is taken."""

from __future__ import annotations

import math
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch

import kakeya
from kakeya import _requests as requests
from kakeya._channel import OPTIONS, address
from kakeya._checks import finite, token_ids
from kakeya._session import CALL_SECONDS
from kakeya.v1 import runtime_pb2 as pb


def generate(**arguments: Any) -> pb.GenerateRequest:
    """The request of a Generate with these arguments, and the defaults of the others."""
    defaults = {name: one.default for name, one in signature(kakeya.Session.generate).parameters.items()}
    for name in ("self", "max_tokens", "timeout"):
        del defaults[name]
    return requests.generate("id", 4, **{**defaults, **arguments})


def test_integers_of_any_making_become_plain_ints(subtests: pytest.Subtests) -> None:
    for given in (
        [0, 1, 2**32 - 1],
        (0, 1, 2**32 - 1),
        iter([0, 1, 2**32 - 1]),
        np.array([0, 1, 2**32 - 1]),
        np.array([0, 1, 2**32 - 1], dtype=np.uint64),
        torch.tensor([0, 1, 2**32 - 1]),
        [np.int64(0), np.uint8(1), np.uint32(2**32 - 1)],
        [torch.tensor(0), 1, 2**32 - 1],
    ):
        with subtests.test(str(given)):
            ids = token_ids(given)
            assert ids == [0, 1, 2**32 - 1]
            assert {type(token_id) for token_id in ids} == {int}


NO_IDS: list[tuple[Any, int]] = [
    ([1, -1], 1),
    ([2**32], 0),
    ([0, 1, 1.0], 2),
    ([True], 0),
    ([None], 0),
    (["7"], 0),
    ([[1, 2]], 0),
    (np.array([1.0, 2.0]), 0),
    (np.array([True]), 0),
    ([np.float32(3)], 0),
    (torch.tensor([[1, 2]]), 0),
    ([torch.tensor(1.5)], 0),
    ([math.nan], 0),
]


def test_what_is_no_token_id_is_named_with_its_place(subtests: pytest.Subtests) -> None:
    for bad, index in NO_IDS:
        with subtests.test(index=index, given=str(bad)[:60]):
            with pytest.raises(kakeya.InvalidTokenIds, match=rf"token_ids\[{index}\]") as caught:
                token_ids(bad)
            assert caught.value.index == index
            assert caught.value.field == "token_ids"
            assert repr(caught.value.value) in str(caught.value)


def test_what_is_no_sequence_of_ids_is_refused_whole(subtests: pytest.Subtests) -> None:
    wrong: tuple[Any, ...] = ("12", b"12", {1: 2}, 5, None, np.int64(5), torch.tensor(5))
    for bad in wrong:
        with subtests.test(str(bad)):
            with pytest.raises(kakeya.InvalidTokenIds) as caught:
                token_ids(bad)
            assert caught.value.index is None


def test_numbers_a_32_bit_float_cannot_hold_do_not(subtests: pytest.Subtests) -> None:
    for number in (math.nan, math.inf, -math.inf, 1e39, True, "1", None):
        with subtests.test(str(number)), pytest.raises(kakeya.InvalidArgument, match="x must be a finite number"):
            finite(number, "x")


# How people, URLs and lists of addresses spell this machine. An unspecified address, as of a target, is this machine.
THIS_MACHINE = (
    *("127.0.0.1:1", "127.1:1", "127.0.1:1", "0x7f.1:1", "2130706433:1", "0177.0.0.1:1", "127.0.0.1.:1", "0.0.0.0:1"),
    *("localhost:1", "LOCALHOST:1", "localhost.:1", "dns:///localhost:1", "dns:LocalHost:1", "ipv4:127.0.0.1:1"),
    "ipv4:127.0.0.1:1,127.0.0.2:2",
    *("[::1]:1", "[0:0:0:0:0:0:0:1]:1", "[::ffff:127.0.0.1]:1", "[::FFFF:7f00:1]:1", "[::]:1", "ipv6:[::1]:1"),
)
ELSEWHERE = (
    *("10.0.0.1:1", "10.1:1", "example.org:1", "localhost.example.org:1", "127.0.0.1.test:1", "127:1", "0x7f:1"),
    *("[::ffff:10.0.0.1]:1", "[fe80::1]:1", "[::7f00:1]:1", "localhost..:1", "dns://10.0.0.1/localhost:1"),
    "ipv4:127.0.0.1:1,10.0.0.1:1",
)


def test_a_key_may_go_unencrypted_to_this_machine(subtests: pytest.Subtests) -> None:
    for target in (*THIS_MACHINE, "unix:/run/k.sock"):
        with subtests.test(target):
            assert address(target, "secret", False).metadata == (("authorization", "Bearer secret"),)


def test_a_key_goes_anywhere_else_encrypted_only(subtests: pytest.Subtests) -> None:
    for target in ELSEWHERE:
        with subtests.test(target):
            with pytest.raises(kakeya.InvalidArgument, match="unencrypted") as caught:
                kakeya.Client(target, api_key="secret")
            assert "secret" not in str(caught.value)
            assert address(target, "secret", True).credentials is not None


def test_a_name_of_this_machine_is_not_asked_of_a_name_server(subtests: pytest.Subtests) -> None:
    for target, reached in (
        ("127.1:50051", "127.0.0.1:50051"),
        ("0x7f000001:1", "127.0.0.1:1"),
        ("LOCALHOST.:1", "localhost:1"),
        ("dns:///127.1:1", "dns:///127.0.0.1:1"),
        ("0:1", "0.0.0.0:1"),
        ("[::ffff:127.0.0.1]:1", "[::ffff:127.0.0.1]:1"),
        ("example.org.:1", "example.org.:1"),
        ("10.1:1", "10.1:1"),
    ):
        with subtests.test(target):
            assert address(target, None, False).reached == reached
            assert kakeya.Client(target).target == target


PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
# What the environment has besides, a target, and the advice; none where gRPC goes without the proxy.
PROXIED = (
    ({}, "10.9.8.7:1", "in http_proxy: to go without it, add 10.9.8.7 to no_proxy"),
    ({}, "dns:///host.test:1", "in http_proxy: to go without it, add host.test to no_proxy"),
    (
        {"https_proxy": "http://proxy.test:8"},
        "host.test:1",
        "proxy proxy.test:8, which the environment names in https_proxy",
    ),
    (
        {"grpc_proxy": "HTTP://proxy.test:8"},
        "host.test:1",
        "in grpc_proxy: to go without it, add host.test to no_proxy",
    ),
    ({"no_proxy": "other.test,10.0.0.0/24"}, "10.9.8.7:1", "add 10.9.8.7 to no_proxy"),
    ({"no_grpc_proxy": "", "no_proxy": "host.test"}, "host.test:1", "add host.test to no_grpc_proxy"),
    ({"no_proxy": "other.test, .TEST"}, "host.test:1", None),
    ({"no_proxy": "10.0.0.0/8"}, "10.9.8.7:1", None),
    ({"no_grpc_proxy": "host.test"}, "host.test:1", None),
    ({}, "ipv4:10.9.8.7:1,10.9.8.6:1", "to go without it, set grpc_proxy to nothing"),
    ({"http_proxy": ""}, "host.test:1", None),
    ({"grpc_proxy": ""}, "host.test:1", None),
    # What gRPC does not take for one.
    *(
        ({"http_proxy": none}, "host.test:1", None)
        for none in ("proxy.test:8", "socks5://proxy.test:8", "::::", "http://me:secret@")
    ),
    *(({}, target, None) for target in THIS_MACHINE),
)


def test_an_error_names_the_proxy_that_a_call_goes_through(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    for variables, target, advice in PROXIED:
        with subtests.test(f"{variables} {target}"), monkeypatch.context() as patch:
            for name in (*PROXIES, "no_proxy", "no_grpc_proxy"):
                patch.delenv(name, raising=False)
            for name, value in {"http_proxy": "http://me:secret@proxy.test:3128/", **variables}.items():
                patch.setenv(name, value)
            note = address(target, None, False).proxy_note
            assert "secret" not in note and (advice in note if advice else note == "")


def test_a_target_is_host_and_port(subtests: pytest.Subtests) -> None:
    for target in ("127.0.0.1", "localhost", "[::1]", "http://127.0.0.1:50051", "https://h:1", "grpc://h:1", " ", 5):
        with subtests.test(str(target)):
            wrong: Any = target
            with pytest.raises(kakeya.InvalidArgument, match=r"target must .*127\.0\.0\.1:50051"):
                kakeya.Client(wrong, api_key="secret")
    for target in ("h:1", "[::1]:1", "::1", "unix:/run/k.sock", "unix-abstract:k", "dns:///h:1", "ipv4:1.2.3.4:1"):
        with subtests.test(target):
            assert address(target, None, False).target == target
    assert address("models.example.org", None, True).target == "models.example.org"


def test_a_port_that_there_is_not_is_refused_and_no_other_is_asked(subtests: pytest.Subtests) -> None:
    """gRPC takes it modulo 65536."""
    for target in ("127.0.0.1:65536", "[::1]:115587", "h:99999", "dns:///h:65537", "ipv4:1.2.3.4:1,1.2.3.5:70000"):
        with subtests.test(target), pytest.raises(kakeya.InvalidArgument, match="target must have ports up to 65535"):
            kakeya.Client(target)
    for target in ("127.0.0.1:65535", "unix:/run/k:99999", "[fe80::99]:1"):
        with subtests.test(target):
            assert address(target, None, False).target == target


def test_what_is_no_setting_of_a_connection_is_refused_when_the_client_is_made(subtests: pytest.Subtests) -> None:
    wrong: tuple[tuple[str, Any], ...] = (("tls", "ca.pem"), ("tls", None), ("tls", 1), ("retry", 5), ("retry", {}))
    for name, value in wrong:
        for kind in (kakeya.Client, kakeya.AsyncClient):
            with subtests.test(f"{name}={value!r}"), pytest.raises(kakeya.InvalidArgument, match=f"{name} must be"):
                kind("127.0.0.1:1", **{name: value})


def test_what_the_wire_cannot_say_is_refused_by_its_name(subtests: pytest.Subtests) -> None:
    lone = "a lone surrogate: \udcff"
    with pytest.raises(kakeya.InvalidArgument, match="session_id must be"):
        requests.session_id(lone)
    with pytest.raises(kakeya.InvalidArgument, match="label must be"):
        requests.create_session(None, (), None, lone, None)
    with pytest.raises(kakeya.InvalidArgument, match="label must be"):
        requests.fork_session("id", None, None, lone, None)
    wrong: tuple[dict[str, Any], ...] = (
        {"logit_bias": [1]},
        {"logit_bias": "bias"},
        {"logprobs": "yes"},
        {"logprobs": 5},
        {"drafting": "no"},
        {"drafting": None},
        {"on_progress": 5},
    )
    for arguments in wrong:
        (name,) = arguments
        with subtests.test(str(arguments)), pytest.raises(kakeya.InvalidArgument, match=f"{name} must be"):
            generate(**arguments)
    for given in (True, 1, np.bool_(True)):
        assert generate(logprobs=given).logprobs
        assert not generate(drafting=given).HasField("drafting")


def test_a_key_with_the_line_break_of_its_file_is_named(subtests: pytest.Subtests) -> None:
    for key in ("secret\n", "\tsecret"):
        with subtests.test(repr(key)):
            with pytest.raises(kakeya.InvalidArgument, match=r"api_key\.strip") as caught:
                address("127.0.0.1:1", key, False)
            assert "secret" not in str(caught.value)


def test_a_client_certificate_comes_with_its_key() -> None:
    with pytest.raises(kakeya.InvalidArgument, match="certificate and key"):
        kakeya.TLS(certificate=b"pem")


def test_keepalive_is_slow_enough_for_the_server_and_finds_a_dead_connection_within_a_call() -> None:
    options = dict(OPTIONS)
    assert options["grpc.keepalive_time_ms"] >= 10_000  # docs/operations.md
    assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] <= (CALL_SECONDS - 10) * 1000
    assert options["grpc.keepalive_permit_without_calls"] == 0
