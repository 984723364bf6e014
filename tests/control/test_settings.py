"""What `schedtop serve` is started with."""

import pytest

from schedtop.control.build import build
from schedtop.control.serve import gateway_arguments
from schedtop.control.settings import ServeSettings, load_settings, parse_memory
from schedtop.engine.errors import ConfigError, KnobRefused


def write(folder, text):
    path = folder / "serve.toml"
    path.write_text(text)
    return path


def test_options_override_the_file_and_knobs_are_merged(folder):
    path = write(folder, 'runner = "fake"\nmax_num_seqs = 8\n[knobs]\nwatermark = 0.1\npolicy = "priority"\n')
    settings = load_settings(path, {"max_num_seqs": 16, "knobs": {"watermark": 0.2}})
    assert (settings.runner, settings.max_num_seqs) == ("fake", 16)
    assert settings.knobs == {"watermark": 0.2, "policy": "priority"}


def test_adapters_of_the_file_and_of_the_command_line_are_merged(folder):
    path = write(folder, '[lora]\na = "one"\nb = "two"\n')
    assert load_settings(path, {"lora": {"b": "three"}}).lora == {"a": "one", "b": "three"}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"lora": {"a": "x"}, "runner": "fake"}, "adapters need a model"),
        ({"lora": {"smollm2": "x"}}, "lora='smollm2' can't name an adapter"),
        ({"lora": {"a": "x"}, "max_adapters": 2}, "max_adapters=2 is outside its range 1 to 1"),
        ({"max_adapters": 1}, "max_adapters=1 is outside its range"),
    ],
)
def test_adapters_that_cannot_be_are_refused(given, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load_settings(None, given)


def test_an_unknown_setting_is_an_error_that_names_the_nearest_one(folder):
    with pytest.raises(ConfigError, match="no setting is called 'max_num_seq'; did you mean 'max_num_seqs'"):
        load_settings(write(folder, "max_num_seq = 8"), {})
    with pytest.raises(ConfigError, match="no setting is called 'zzz'; known are name, runner"):
        load_settings(write(folder, "zzz = 8"), {})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('max_num_seqs = "8"', "Expected `int`, got `str`"),
        ('runner = "vllm"', "runner"),
        ('name = "../x"', "can't be a file name"),
        ("port = 70000", "port=70000 is outside its range 0 to 65535"),
        ('kv_memory = "lots"', "'lots' is no amount of memory"),
        ('kv_memory = "1GB"\nnum_kv_blocks = 5', "give one of them"),
        ("max_num_seqs = ", "isn't TOML"),
    ],
)
def test_a_bad_setting_is_one_clear_error(folder, text, complaint):
    with pytest.raises(ConfigError) as refusal:
        load_settings(write(folder, text), {})
    assert complaint in str(refusal.value)


def test_a_missing_file_is_told(folder):
    with pytest.raises(ConfigError, match="can't be read"):
        load_settings(folder / "missing.toml", {})


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("1000", 1000), ("512MiB", 512 << 20), ("4 GB", 4 * 10**9), ("1.5kib", 1536), ("7B", 7)]
)
def test_memory_is_read_in_decimal_and_binary_units(text, num_bytes):
    assert parse_memory(text) == num_bytes


def test_sizes_reach_the_engine_and_its_introduction():
    settings = ServeSettings(
        runner="fake", name="e1", block_size=8, num_kv_blocks=50, max_model_len=128, max_num_seqs=4,
        max_num_batched_tokens=64, knobs={"max_num_seqs": 2}, served_model_name="shown",
    )  # fmt: skip
    core, info = build(settings)
    assert (info.name, info.model, info.num_usable_blocks, info.max_model_len) == ("e1", "shown", 49, 128)
    assert core.config.block_size == 8
    assert core.scheduler.knobs.max_num_seqs == 2
    assert build(settings)[1].boot_id != info.boot_id


def test_a_start_value_out_of_range_is_refused_before_anything_runs():
    with pytest.raises(KnobRefused, match="above its ceiling"):
        build(ServeSettings(runner="fake", max_num_seqs=4, knobs={"max_num_seqs": 5}))


def test_the_gateway_is_told_where_the_engine_is(folder):
    settings = ServeSettings(port=0, host="::1", allowed_hosts=["a", "b"], token_file="t.toml")
    assert gateway_arguments(settings, folder / "e.sock") == [
        "gateway", "--connect", str(folder / "e.sock"), "--host", "::1", "--port", "0",
        "--drain", "5", "--allowed-host", "a", "--allowed-host", "b", "--token-file", "t.toml",
    ]  # fmt: skip
