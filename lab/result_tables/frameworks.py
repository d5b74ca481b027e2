"""Tables of transformers and of serving engines."""

from result_tables.common import load, table


SHOWN_BATCHES = (1, 8, 32, 128)  # as many as a page is wide


def transformers_table():
    """Whole models of transformers, from bench/transformers_e2e.py."""
    found = load("transformers.json")
    if not found:
        return ""
    of = lambda row: (row["model"], row["dtype"], row.get("topology", "1"))
    text = []
    for model, dtype, topology in dict.fromkeys(map(of, found)):
        rows = [r for r in found if of(r) == (model, dtype, topology)]
        decoded = sorted({(r["batch"], r["graph"]) for r in rows if "tpot_ms" in r and r["batch"] in SHOWN_BATCHES})
        over = "" if topology == "1" else f", {topology}"
        head = f"| {model}, {dtype}{over} | first token |"
        head += "".join(f" batch {batch}{', graph' if graph else ''} |" for batch, graph in decoded)
        lines = [head + " error |", "|---|" + "---:|" * (len(decoded) + 2)]
        reasons, absent = [], []
        for implementation in dict.fromkeys(r["implementation"] for r in rows):
            own = [r for r in rows if r["implementation"] == implementation]
            first = next((r["ttft_ms"] for r in own if "ttft_ms" in r), None)
            cells = [f"{first:.1f}" if first is not None else "–"]
            for batch, graph in decoded:
                value = next((r["tpot_ms"] for r in own if (r.get("batch"), r.get("graph")) == (batch, graph)
                              and "tpot_ms" in r), None)
                cells.append("–" if value is None else f"{value:.2f}")
            error = next((r["error"] for r in own if "error" in r), None)
            cells.append("–" if error is None else f"{error:.1e}")
            reason = next((r["refused"] for r in own if "refused" in r), None)
            if set(cells) == {"–"}:
                # Nothing was measured: the reason is all there is to say.
                absent.append(f"{implementation} ({(reason or 'not run').split('. ')[0]})")
                continue
            lines.append(f"| {implementation} | " + " | ".join(cells) + " |")
            if reason is not None:
                reasons.append(f"{implementation}: {reason.split('. ')[0]}")
        row = next(r for r in rows if "prompt" in r and "ttft_ms" in r)
        machine = row["machine"] if " x " in row["machine"] else f"one {row['machine']}"
        ranks = " Batches are those of each rank, times those of the slower one." if topology != "1" else ""
        against = "the first line's" if topology == "1" else "those in fp32"
        prompt = next(r["prompt"] for r in rows if "tpot_ms" in r)
        text.append("\n".join(lines))
        text.append(
            f"Milliseconds on {machine}, torch {row['torch']}, transformers {row['transformers']}, commit "
            f"{row['commit']}; random weights, {row['layers']} layers. First token: one prompt of {row['prompt']} "
            f"tokens. Batches: one decoding step after {prompt} tokens, without and in a CUDA graph.{ranks} Error: of "
            f"the prompt's logits against {against}."
            + (" –: " + "; ".join(reasons) + "." if reasons else "")
            + (" Did not run: " + "; ".join(absent) + "." if absent else "")
        )
    return "\n\n".join(text)


def engines_table():
    """Whole models in serving engines, from bench/engines.py."""
    heads = {"tpot_ms": "batch {batch}", "ttft_ms": "first token, {prompt}", "requests_per_s": "requests/s"}
    groups = {}
    for row in load("engines.json") or []:
        groups.setdefault(tuple(row[k] for k in ("engine", "model", "dtype", "topology", "machine")), []).append(row)
    text = []
    for (engine, model, dtype, topology, machine), rows in groups.items():
        # Keys are the measured field, the batch, the prompt and the backend.
        found = {(name, row["batch"], row["prompt"], row["backend"]): row
                 for name in heads for row in rows if name in row}
        points = sorted({key[:3] for key in found}, key=lambda p: (list(heads).index(p[0]), p[1:]))
        backends = list(dict.fromkeys(row["backend"] for row in rows if row["backend"] != "none"))
        titles = [heads[name].format(batch=batch, prompt=prompt) for name, batch, prompt in points]
        lines = [f"| {model}, {dtype} | " + " | ".join(titles) + " | error |", "|---|" + "---:|" * (len(points) + 1)]
        for backend in backends:
            cells = [found.get((*point, backend), {}).get(point[0]) for point in points]
            error = next((r["error"] for r in rows if r["backend"] == backend and r.get("error") is not None), None)
            lines.append(f"| {backend} | " + " | ".join("–" if c is None else f"{c:.2f}" for c in cells)
                         + (" | – |" if error is None else f" | {error:.4f} |"))
        gains, shares = [], []
        for point in points:
            name = point[0]
            ours = found.get((*point, "switchyard"), {})
            others = [found[(*point, b)][name] for b in backends if b != "switchyard" and (*point, b) in found]
            gain = None
            if others and ours:
                gain = ours[name] / max(others) if name == "requests_per_s" else min(others) / ours[name]
            part = ours.get("moe_share")
            gains.append("–" if gain is None else f"**{gain:.2f} ×**")
            shares.append("–" if part is None or part <= 0 else f"{part:.0%}")
        lines.append("| best other / switchyard | " + " | ".join(gains) + " | |")
        if any(share != "–" for share in shares):
            lines.append("| experts' share of the time | " + " | ".join(shares) + " | |")
        row = next((r for r in rows if r["backend"] == "switchyard"), rows[0])
        made = (f" Switchyard's {row['made_layers']} layers took {row['made_s']:.2f} s of the start and "
                f"{row['made_mib']:.0f} MiB." if "made_s" in row else "")
        machine = machine if " x " in machine else f"one {machine}"
        rate = "" if "requests/s" not in titles else ", and requests of 512 tokens in and 128 out with 64 under way"
        ranks = "" if topology == "1" else " Batches and prompts are those of each rank, times those of the slower one."
        text += ["\n".join(lines),
                 f"{engine} {row['version']}, {machine}, {row['layers']} layers, topology {topology}, torch "
                 f"{row['torch']}, commit {row['commit']}. Milliseconds a token after a prompt of 128, milliseconds to "
                 f"the first token{rate}.{ranks}{made}"]
    return "\n\n".join(text)


def check_hf():
    """Expert classes of transformers, from `python -m switchyard check-hf` with the newest transformers and with
    the one that the other tests run with."""
    found, older = load("check_hf.json"), load("check_hf_older.json")
    if found is None or older is None:
        return ""

    def table(rows, refused=False):
        if refused:
            head = "| family | class | why not |\n|---|---|---|\n"
            return head + "\n".join(f"| {r['family']} | `{r['name']}` | {r['reason']} |" for r in rows)
        head = "| family | class | activation | order of w13 | error f32 | bf16 | eager's own bf16 |\n"
        head += "|---|---|---|---|---|---|---|\n"
        return head + "\n".join(
            f"| {r['family']} | `{r['name']}` | {r['activation']} | {r['layout']} | {r['f32_error']:.0e} "
            f"| {r['bf16_error']:.0e} | {r['bf16_error_of_eager']:.0e} |"
            for r in rows
        )

    def agreeing(document, reached_by):
        return [r for r in document["classes"] if r["status"] == "agrees" and r["reached_by"] == reached_by]

    def counts(document):
        through = [r for r in document["classes"] if r["reached_by"] == "experts_implementation"]
        refused = [r for r in document["classes"] if r["status"] == "refused"]
        return (
            f"With transformers {document['transformers']}, {len(agreeing(document, 'experts_implementation'))} of the "
            f"{len(through)} expert classes that go through `experts_implementation` agree with eager, and "
            f"{len(agreeing(document, 'patch'))} that need `patch()`; {len(refused)} are refused."
        )

    others = [r for r in found["classes"] if r["status"] != "agrees"]
    return (
        f"{counts(found)} {counts(older)} The tables are of {found['transformers']}.\n\n"
        f"**`experts_implementation=\"switchyard\"`**\n\n{table(agreeing(found, 'experts_implementation'))}\n\n"
        f"**`switchyard.patch(model)`**\n\n{table(agreeing(found, 'patch'))}\n\n"
        f"**Refused**\n\n{table(others, refused=True)}"
    )
