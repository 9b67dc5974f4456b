import itertools
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hora.rendezvous.protocol import (
    CHALLENGE_BYTES,
    FRAME_OVERHEAD_BYTES,
    HELLO_BYTES,
    MAC_BYTES,
    MAGIC,
    PROOF_BYTES,
    Channel,
    ClientHandshake,
    ProtocolError,
    ServerSide,
    WrongKeyError,
    pack,
    unpack,
)

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
LIMIT = 4096


def hands_shaken(key: bytes = KEY) -> tuple[Channel, ServerSide]:
    handshake, server = ClientHandshake(key), ServerSide(key, max_frame_bytes=LIMIT)
    assert list(server.feed(handshake.hello())) == []
    proof, client = handshake.answer(bytes(server.outgoing), max_frame_bytes=LIMIT)
    server.outgoing.clear()
    assert list(server.feed(proof)) == []
    return client, server


def test_messages_have_the_sizes_that_each_side_waits_for() -> None:
    handshake, server = ClientHandshake(KEY), ServerSide(KEY, max_frame_bytes=LIMIT)
    list(server.feed(handshake.hello()))
    proof, _ = handshake.answer(bytes(server.outgoing))
    assert (len(handshake.hello()), len(server.outgoing), len(proof)) == (HELLO_BYTES, CHALLENGE_BYTES, PROOF_BYTES)


def test_payloads_arrive_in_both_directions() -> None:
    client, server = hands_shaken()
    assert list(server.feed(client.seal(b"one") + client.seal(b""))) == [b"one", b""]
    server.reply(b"two")
    server.reply(b"three")
    assert list(client.feed(bytes(server.outgoing))) == [b"two", b"three"]


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(1, 40))
def test_payloads_survive_being_cut_anywhere(payloads: list[bytes], piece_bytes: int) -> None:
    client, server = hands_shaken()
    stream = b"".join(map(client.seal, payloads))
    pieces = [stream[begin : begin + piece_bytes] for begin in range(0, len(stream), piece_bytes)]
    assert list(itertools.chain.from_iterable(map(server.feed, pieces))) == payloads


def test_client_refuses_a_server_with_another_key() -> None:
    handshake, server = ClientHandshake(KEY), ServerSide(OTHER_KEY, max_frame_bytes=LIMIT)
    list(server.feed(handshake.hello()))
    with pytest.raises(WrongKeyError):
        handshake.answer(bytes(server.outgoing))


def test_server_refuses_a_client_with_another_key() -> None:
    server = ServerSide(KEY, max_frame_bytes=LIMIT)
    handshake, accomplice = ClientHandshake(OTHER_KEY), ServerSide(OTHER_KEY, max_frame_bytes=LIMIT)
    list(server.feed(handshake.hello()))
    list(accomplice.feed(handshake.hello()))
    proof, _ = handshake.answer(bytes(accomplice.outgoing))
    with pytest.raises(WrongKeyError):
        list(server.feed(proof))


def test_proof_of_one_connection_is_no_proof_on_another() -> None:
    handshake, server = ClientHandshake(KEY), ServerSide(KEY, max_frame_bytes=LIMIT)
    list(server.feed(handshake.hello()))
    proof, _ = handshake.answer(bytes(server.outgoing))
    second = ServerSide(KEY, max_frame_bytes=LIMIT)
    with pytest.raises(WrongKeyError):
        list(second.feed(handshake.hello() + proof))


def test_servers_own_proof_sent_back_is_refused() -> None:
    server = ServerSide(KEY, max_frame_bytes=LIMIT)
    list(server.feed(MAGIC + bytes(32)))
    with pytest.raises(WrongKeyError):
        list(server.feed(bytes(server.outgoing[-MAC_BYTES:])))


def test_clients_own_hello_sent_back_is_refused() -> None:
    handshake = ClientHandshake(KEY)
    with pytest.raises(WrongKeyError):
        handshake.answer(handshake.hello() + bytes(MAC_BYTES))


def test_another_version_is_refused_by_both_sides() -> None:
    future = MAGIC[:-1] + b"\x02"
    with pytest.raises(ProtocolError, match="this version"):
        list(ServerSide(KEY, max_frame_bytes=LIMIT).feed(future + bytes(32)))
    with pytest.raises(ProtocolError, match="this version"):
        ClientHandshake(KEY).answer(future + bytes(64))


def test_frame_with_any_bit_changed_yields_nothing() -> None:
    frame_bytes = len(b"payload") + FRAME_OVERHEAD_BYTES
    for position, bit in itertools.product(range(frame_bytes), range(8)):
        client, server = hands_shaken()
        frame = bytearray(client.seal(b"payload"))
        frame[position] ^= 1 << bit
        received: list[bytes] = []
        try:
            received += server.feed(bytes(frame))
            # A length that was made larger waits for bytes; whatever comes, they cannot make a valid frame.
            received += server.feed(bytes(LIMIT))
            pytest.fail("nothing was refused")
        except ProtocolError:
            assert received == []


@pytest.mark.parametrize("order", [[0, 0], [1, 0], [0, 2], [1]])
def test_frames_repeated_swapped_or_left_out_are_refused(order: list[int]) -> None:
    client, server = hands_shaken()
    frames = [client.seal(b"%d" % index) for index in range(3)]
    with pytest.raises(ProtocolError, match="changed, repeated or out of order"):
        list(server.feed(b"".join(frames[index] for index in order)))


def test_frame_sent_back_to_its_sender_is_refused() -> None:
    client, _ = hands_shaken()
    with pytest.raises(ProtocolError):
        list(client.feed(client.seal(b"payload")))


def test_frame_of_another_connection_is_refused() -> None:
    (one, _), (_, other) = hands_shaken(), hands_shaken()
    with pytest.raises(ProtocolError):
        list(other.feed(one.seal(b"payload")))


def test_length_over_the_limit_is_refused_before_its_bytes_come() -> None:
    _, server = hands_shaken()
    with pytest.raises(ProtocolError, match="exceeds the limit of 4096"):
        list(server.feed((LIMIT - FRAME_OVERHEAD_BYTES + 1).to_bytes(4, "big")))


def test_largest_payload_passes_and_a_larger_one_is_not_sealed() -> None:
    client, server = hands_shaken()
    with pytest.raises(ValueError, match="must fit into 4096 bytes, but has 4097"):
        client.seal(bytes(LIMIT - FRAME_OVERHEAD_BYTES + 1))
    largest = bytes(LIMIT - FRAME_OVERHEAD_BYTES)
    assert list(server.feed(client.seal(largest))) == [largest]


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_packed_fields_are_unpacked(fields: list[bytes]) -> None:
    assert unpack(pack(fields)) == fields


@given(st.binary(max_size=40))
def test_unpacking_anything_gives_its_only_packing_or_an_error(payload: bytes) -> None:
    with suppress(ProtocolError):
        assert pack(unpack(payload)) == payload
