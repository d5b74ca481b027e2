"""Files of results that scripts beside `switchyard bench` write."""

import json


def percentile(values, share):
    """Nearest rank, as in rows of the command."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def merge(path, rows, key):
    """Replaces the rows that agree in the fields of `key`, a row per line, as `switchyard bench --json` does."""
    kept = {tuple(row[name] for name in key): row for row in (json.loads(path.read_text()) if path.exists() else [])}
    kept.update({tuple(row[name] for name in key): row for row in rows})
    partial = path.with_suffix(".partial")
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in kept.values())
    partial.write_text(f"[\n{lines}\n]\n")
    partial.replace(path)
