import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hora.errors import CheckpointIncomplete, CheckpointMismatch, ConfigError
from hora.train.checkpoint import manifest as module
from hora.train.checkpoint.manifest import CheckpointName, FileFacts, Manifest, check_count, check_entries, finite, rank_entry

FACTS = FileFacts(10, "0" * 64)
MANIFEST = Manifest(
    1,
    "0.1.0",
    "2.13.0",
    1200,
    3,
    0,
    4,
    4,
    None,
    "a machine",
    1.5,
    "2026-01-02T03:04:05+00:00",
    {"model.json": FACTS, "model.safetensors": FACTS},
)


@pytest.mark.parametrize(
    ("text", "name"), [("step-00001200.g0", CheckpointName(0, 1200)), ("step-123456789.g12", CheckpointName(12, 123456789))]
)
def test_name_is_read_as_it_is_written(text, name):
    assert CheckpointName.parse(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text", ["", "step-1.g0", "step-00000001", "step-00000001.g00", "step-000000001.g0", "step-00000001.g0 ", ".tmp-step-00000001.g0-x"]
)
def test_what_is_no_name_is_none(text):
    assert CheckpointName.parse(text) is None


def test_a_later_generation_is_newer_whatever_its_step():
    assert sorted([CheckpointName(1, 5), CheckpointName(0, 9), CheckpointName(0, 7)]) == [
        CheckpointName(0, 7),
        CheckpointName(0, 9),
        CheckpointName(1, 5),
    ]


@pytest.mark.parametrize("metric", [None, 0.1, 1, 1e300, -0.0])
def test_manifest_is_read_as_it_is_written(metric):
    manifest = dataclasses.replace(MANIFEST, metric=metric)
    assert Manifest.parse(manifest.render()) == manifest


def test_manifest_knows_its_name():
    assert MANIFEST.name == CheckpointName(0, 1200)


def test_manifest_is_readable_json():
    data = json.loads(MANIFEST.render())
    assert data["step"] == 1200
    assert data["files"]["model.json"] == {"size_bytes": 10, "sha256": "0" * 64}


def test_every_flipped_bit_of_a_manifest_is_seen():
    content = MANIFEST.render()
    for position in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            with pytest.raises(CheckpointIncomplete):
                Manifest.parse(bytes(damaged))


def test_every_truncation_of_a_manifest_is_seen():
    content = MANIFEST.render()
    for length in range(len(content)):
        with pytest.raises(CheckpointIncomplete):
            Manifest.parse(content[:length])


@given(st.binary() | st.text().map(str.encode))
def test_no_other_content_is_a_manifest(content):
    with pytest.raises(CheckpointIncomplete):
        Manifest.parse(content)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[]", b'{"sha256": 1}', b'{"a": NaN, "sha256": ""}'])
def test_odd_json_is_no_manifest(content):
    with pytest.raises(CheckpointIncomplete):
        Manifest.parse(content)


def test_a_later_format_is_not_called_damaged():
    with pytest.raises(CheckpointMismatch, match="must have format 1, but has 2"):
        Manifest.parse(dataclasses.replace(MANIFEST, format=2).render())


@pytest.mark.parametrize("name", ["../model", "/etc/passwd", "a/b", "", ".", "..", ".hidden", "a" * 65, "a\n", "a\x00", "é"])
def test_a_file_name_that_leads_elsewhere_is_refused(name):
    forged = module._seal(dataclasses.asdict(dataclasses.replace(MANIFEST, files={name: FACTS})))
    with pytest.raises(CheckpointIncomplete, match="is no manifest"):
        Manifest.parse(forged)


@pytest.mark.parametrize("change", [{"step": -1}, {"step": "1"}, {"files": []}, {"extra": 1}, {"world_size": 0}])
def test_fields_of_the_wrong_kind_are_refused(change):
    with pytest.raises(CheckpointIncomplete, match="is no manifest"):
        Manifest.parse(module._seal({**dataclasses.asdict(MANIFEST), **change}))


@pytest.mark.parametrize(("metric", "kept"), [(None, None), (1.5, 1.5), (float("nan"), None), (float("inf"), None)])
def test_only_finite_metrics_count(metric, kept):
    assert finite(metric) == kept


def test_entries_must_be_plain_names():
    check_entries(["model", "optimizer_2", "a" * 48])
    with pytest.raises(ConfigError, match=r"'manifest', 'rank-00001', 'a/b', '', 'a\.json'"):
        check_entries(["model", "manifest", rank_entry(1), "a/b", "", "a.json"])


@pytest.mark.parametrize("value", [-1, 1.0, True, "1", None, 10**15])
def test_steps_must_be_counts(value):
    check_count("step", 0)
    check_count("step", 10**15 - 1)
    with pytest.raises(ConfigError, match="step must be an integer from 0"):
        check_count("step", value)
