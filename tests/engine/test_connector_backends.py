"""Where blocks are kept: a folder and a real Redis server. Whatever lies there, wrong KV never comes back."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import ConfigError
from schedtop.engine.kv.connector.attach import attach_store, open_store
from schedtop.engine.kv.connector.folder import FolderStore
from schedtop.engine.kv.connector.format import BadBlock, KVFormat
from schedtop.engine.kv.connector.redis import PAUSE_S, RedisStore
from schedtop.engine.kv.connector.store import BlockStore
from schedtop.engine.loop import EngineLoop
from schedtop.engine.outputs import EngineCoreOutputs
from schedtop.engine.runner.fake import FakeRunner
from schedtop.engine.sampling_params import SamplingParams

FORMAT = KVFormat(model="m", dtype="int64", block_shape=(16,))
OTHERS = [
    KVFormat(model="another", dtype="int64", block_shape=(16,)),
    KVFormat(model="m", dtype="float32", block_shape=(32,)),
    KVFormat(model="m", dtype="int64", block_shape=(4, 4)),
    KVFormat(model="m", dtype="int64", block_shape=(16,), namespace="tenant"),
    KVFormat(model="m", dtype="int64", block_shape=(16,), hash_scheme="older"),
]
KEYS = [bytes([n]) * 32 for n in range(4)]
CONTENT = bytes(range(128))


class RedisServer:
    """A real server of the test's own, on a socket in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        binary = shutil.which("redis-server")
        assert binary is not None, "these tests need redis-server: install the Debian package redis-server"
        self._command = [binary, "--port", "0", "--unixsocket", str(folder / "redis.sock"), "--save", "", "--dir"]
        self._command.append(str(folder))
        self.url = f"unix://{folder / 'redis.sock'}"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        with redis.Redis.from_url(self.url, retry=Retry(ConstantBackoff(0.05), 200)) as client:
            client.ping()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("r"))
    yield server
    server.stop()


@pytest.fixture(params=["folder", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return f"folder:{tmp_path / 'kv'}"
    server: RedisServer = request.getfixturevalue("server")
    return server.url


@pytest.fixture
def store(url: str) -> Iterator[BlockStore]:
    store = open_store(url, FORMAT)
    yield store
    store.close()


# ---- the format ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", OTHERS, ids=["model", "dtype", "shape", "namespace", "hash scheme"])
def test_a_block_of_another_format_is_none_of_ours(other: KVFormat) -> None:
    assert other.fingerprint != FORMAT.fingerprint
    with pytest.raises(BadBlock, match="another model"):
        FORMAT.unpack(KEYS[0], other.pack(KEYS[0], CONTENT))


def test_a_block_under_a_wrong_key_is_refused() -> None:
    with pytest.raises(BadBlock, match="prefix"):
        FORMAT.unpack(KEYS[1], FORMAT.pack(KEYS[0], CONTENT))


def test_a_block_cut_anywhere_is_refused() -> None:
    packed = FORMAT.pack(KEYS[0], CONTENT)
    for length in range(len(packed)):
        with pytest.raises(BadBlock):
            FORMAT.unpack(KEYS[0], packed[:length])
    assert FORMAT.unpack(KEYS[0], packed) == CONTENT


def test_a_block_with_any_byte_changed_is_refused() -> None:
    packed = FORMAT.pack(KEYS[0], CONTENT)
    for place in range(len(packed)):
        with pytest.raises(BadBlock):
            FORMAT.unpack(KEYS[0], packed[:place] + bytes([packed[place] ^ 1]) + packed[place + 1 :])


# ---- the stores ------------------------------------------------------------------------------------------------


def test_a_block_comes_back_as_it_was_put(store: BlockStore) -> None:
    store.put(KEYS[0], CONTENT)
    assert store.get(KEYS[0]) == CONTENT
    assert store.get(KEYS[1]) is None


def test_a_prefix_ends_at_the_first_block_that_is_missing(store: BlockStore) -> None:
    for key in (KEYS[0], KEYS[1], KEYS[3]):
        store.put(key, CONTENT)
    assert store.count_prefix(KEYS) == 2
    assert store.count_prefix(KEYS[2:]) == 0
    assert store.count_prefix([]) == 0


def test_engines_of_different_models_dont_see_each_others_blocks(url: str, store: BlockStore) -> None:
    store.put(KEYS[0], CONTENT)
    other = open_store(url, OTHERS[0])
    assert (other.count_prefix(KEYS[:1]), other.get(KEYS[0])) == (0, None)
    other.close()


def test_a_truncated_file_is_a_miss_and_makes_room_for_a_good_one(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, FORMAT)
    store.put(KEYS[0], CONTENT)
    path = store.path_of(KEYS[0])
    packed = path.read_bytes()
    path.write_bytes(packed[:100])
    assert store.count_prefix(KEYS) == 0
    path.write_bytes(packed[:-1])
    assert store.get(KEYS[0]) is None
    store.put(KEYS[0], CONTENT)
    assert store.get(KEYS[0]) == CONTENT


def test_a_foreign_file_under_our_name_is_a_miss(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, FORMAT)
    store.put(KEYS[0], CONTENT)
    store.put(KEYS[1], CONTENT[::-1])
    store.path_of(KEYS[1]).replace(store.path_of(KEYS[0]))
    assert store.get(KEYS[0]) is None


def test_no_half_written_file_is_ever_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path, FORMAT)

    def fill_the_disk(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:50])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill_the_disk)
    with pytest.raises(OSError, match="No space"):
        store.put(KEYS[0], CONTENT)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_cant_be_used_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        open_store(f"folder:{tmp_path / 'file'}", FORMAT)


@pytest.mark.parametrize("bad", ["", "folder:", "s3://bucket", "/tmp/kv", "redis://host:port"])
def test_a_store_that_nobody_knows_is_refused_with_those_that_exist(bad: str) -> None:
    with pytest.raises(ConfigError, match="give"):
        open_store(bad, FORMAT)


def test_a_damaged_value_in_redis_is_a_miss_and_is_deleted(server: RedisServer) -> None:
    store = RedisStore(server.url, FORMAT)
    store.put(KEYS[0], CONTENT)
    with redis.Redis.from_url(server.url) as client:
        (name,) = client.keys("schedtop:kv:*")
        client.set(name, b"rubbish")
        assert store.get(KEYS[0]) is None
        assert client.keys("*") == []
    store.put(KEYS[0], CONTENT)
    assert store.get(KEYS[0]) == CONTENT
    store.close()


def test_a_redis_server_that_is_gone_is_left_alone_for_a_while(server: RedisServer) -> None:
    now = 100.0
    store = RedisStore(server.url, FORMAT, clock=lambda: now)
    store.put(KEYS[0], CONTENT)
    server.stop()
    assert store.count_prefix(KEYS) == 0
    server.start()
    store.put(KEYS[0], CONTENT)
    assert store.get(KEYS[0]) is None  # not asked: it has just failed
    now += PAUSE_S
    store.put(KEYS[0], CONTENT)
    assert store.get(KEYS[0]) == CONTENT
    store.close()


# ---- whole engines ---------------------------------------------------------------------------------------------


def serve(url: str, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Outputs of an engine with real threads over a store, and how many tokens it computed."""
    config = EngineConfig(num_kv_blocks=200, max_num_batched_tokens=64, max_num_seqs=8)
    runner = FakeRunner()
    core = EngineCore(config, runner)
    attach_store(core, runner, open_store(url, FORMAT))
    awake = threading.Event()
    loop = EngineLoop(core, wake_watcher=awake.set)
    for index, prompt in enumerate(prompts):
        loop.submit(lambda core, i=index, p=prompt: core.add_request(str(i), p, SamplingParams(max_tokens=5)))
    outputs: list[list[int]] = [[] for _ in prompts]
    num_left = len(prompts)
    loop.start()
    while num_left:
        assert loop.is_alive, loop.failure
        awake.clear()
        loop.watcher_parked = True
        if not loop.outbox:
            awake.wait()
            continue
        done = loop.outbox.popleft()
        for output in done.outputs if isinstance(done, EngineCoreOutputs) else ():
            outputs[int(output.request_id)] += output.new_token_ids
            num_left -= output.finish_reason is not None
    loop.stop()
    core.shutdown()
    assert core.self_check() == []
    return outputs, runner.num_computed_tokens


def test_a_second_engine_continues_from_the_first_ones_store(url: str) -> None:
    prompts = [[n, *range(100, 180), n] for n in range(6)]
    first, num_first = serve(url, prompts)
    second, num_second = serve(url, prompts)
    assert second == first
    assert num_first - num_second == 6 * 80  # five of each prompt's blocks


def test_the_engine_goes_on_when_its_redis_server_dies(server: RedisServer) -> None:
    prompts = [[n, *range(100, 180), n] for n in range(3)]
    first, num_first = serve(server.url, prompts)
    server.stop()
    second, num_second = serve(server.url, prompts)
    assert (second, num_second) == (first, num_first)
    server.start()
