#!/usr/bin/env python3
"""Train a small character model with JAX, saved by Orbax, so that a preemption changes nothing in the result.

Everything that spotq needs is plain: it restores SPOTQ_CHECKPOINT_DIR before the start, and this program resumes
from the newest step there. The rest is optional: it reports its progress to SPOTQ_PROGRESS_FILE, and saves at once
on USR1 and when SPOTQ_NOTICE_FILE appears. On TERM it saves and exits with 143.
"""

import argparse
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

# The libraries below take seconds to load. Until there is something to save, a request to save must not kill.
signal.signal(signal.SIGUSR1, signal.SIG_IGN)

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

CONTEXT, EMBED, HIDDEN, BATCH = 8, 16, 64, 64
LEARNING_RATE, BETA1, BETA2, EPSILON = 3e-3, 0.9, 0.999, 1e-8
SEED = 20


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="steps to train for")
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parent.parent / "data" / "corpus.txt")
    parser.add_argument("--out", type=Path, help="final parameters, as .npz")
    parser.add_argument("--save-every", type=int, default=50, help="steps between saves; 0 for never")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--step-ms", type=int, default=0, help="least time per step; changes nothing in the result")
    return parser.parse_args()


class Requests:
    """Notes signals and the notice file; the training loop acts on them between two steps."""

    def __init__(self):
        self.stop = self.save = self.notice_seen = False
        self.notice_file = os.environ.get("SPOTQ_NOTICE_FILE")
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stop", True))
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "save", True))

    def take_save(self):
        present = bool(self.notice_file) and os.path.exists(self.notice_file)
        appeared = present and not self.notice_seen
        self.notice_seen = present
        wanted, self.save = self.save or appeared, False
        return wanted


class Progress:
    def __init__(self, total):
        path = os.environ.get("SPOTQ_PROGRESS_FILE")
        self.file = open(path, "a", buffering=1) if path else None
        self.total, self.last_step, self.last_time = total, None, 0.0

    def note(self, step):
        due = self.last_step is None or step >= self.last_step + 10 or time.monotonic() >= self.last_time + 0.2
        if self.file and (due or step >= self.total):
            self.file.write(json.dumps({"step": step, "total": self.total}) + "\n")
            self.last_step, self.last_time = step, time.monotonic()


def init_state(vocab):
    embed, first, second = jax.random.split(jax.random.key(SEED), 3)
    params = {
        "embed": jax.random.normal(embed, (vocab, EMBED)),
        "w1": jax.random.normal(first, (CONTEXT * EMBED, HIDDEN)) / (CONTEXT * EMBED) ** 0.5,
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(second, (HIDDEN, vocab)) / HIDDEN**0.5,
        "b2": jnp.zeros(vocab),
    }
    # Two trees of zeros, for a step takes over the buffers of the state that it is given, and each only once.
    first, second = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    return {"params": params, "first": first, "second": second, "step": jnp.zeros((), jnp.int32)}


def loss_of(params, contexts, targets):
    hidden = params["embed"][contexts].reshape(contexts.shape[0], -1)
    hidden = jnp.tanh(hidden @ params["w1"] + params["b1"])
    logits = jax.nn.log_softmax(hidden @ params["w2"] + params["b2"])
    return -jnp.mean(logits[jnp.arange(targets.shape[0]), targets])


@partial(jax.jit, donate_argnums=0)
def train_step(state, symbols):
    # The batch depends on the step number alone, so the state needs no position in the data.
    key = jax.random.fold_in(jax.random.key(SEED + 1), state["step"])
    starts = jax.random.randint(key, (BATCH,), 0, symbols.shape[0] - CONTEXT)
    contexts = symbols[starts[:, None] + jnp.arange(CONTEXT)]
    loss, grads = jax.value_and_grad(loss_of)(state["params"], contexts, symbols[starts + CONTEXT])
    step = state["step"] + 1
    first = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state["first"], grads)
    second = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, state["second"], grads)
    correct1, correct2 = 1 - BETA1**step, 1 - BETA2**step
    params = jax.tree.map(
        lambda p, m, v: p - LEARNING_RATE * (m / correct1) / (jnp.sqrt(v / correct2) + EPSILON),
        state["params"], first, second,
    )  # fmt: skip
    return {"params": params, "first": first, "second": second, "step": step}, loss


def open_manager():
    directory = os.environ.get("SPOTQ_CHECKPOINT_DIR")
    if not directory:
        return None
    # Two are kept, so that a damaged newest one costs some steps and not the run. Saving is synchronous: when save()
    # returns, the step's directory has its final name, which is what spotq's profile `orbax` waits for.
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False, create=True)
    return ocp.CheckpointManager(Path(directory).resolve(), options=options)


def restore(manager, state):
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    for step in sorted(manager.all_steps(), reverse=True) if manager else []:
        try:
            return manager.restore(step, args=ocp.args.StandardRestore(abstract))
        except Exception as error:  # Whatever is wrong with it, an older one may be whole.
            print(f"skipping checkpoint {step}: {error}", file=sys.stderr, flush=True)
    return state


def save(manager, state):
    step = int(state["step"])
    if manager and manager.latest_step() != step:
        # Forced: the manager's own save interval is not to overrule a notice.
        manager.save(step, args=ocp.args.StandardSave(state), force=True)
        manager.wait_until_finished()
        print(f"saved step {step}", flush=True)


def write_final(path, params):
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        np.savez(file, **{name: np.asarray(value) for name, value in sorted(params.items())})
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def main():
    args = parse_args()
    requests = Requests()
    text = np.frombuffer(args.data.read_bytes(), dtype=np.uint8)
    alphabet, indices = np.unique(text, return_inverse=True)
    symbols = jnp.asarray(indices.astype(np.int32))
    manager = open_manager()
    state = restore(manager, init_state(len(alphabet)))
    step = int(state["step"])
    attempt = os.environ.get("SPOTQ_ATTEMPT", "1")
    print(f"attempt {attempt}: starting at step {step} of {args.steps}", flush=True)
    progress = Progress(args.steps)
    progress.note(step)
    while step < args.steps and not requests.stop:
        if requests.take_save():
            save(manager, state)
        began = time.monotonic()
        state, loss = train_step(state, symbols)
        step = int(state["step"])
        progress.note(step)
        if step % args.log_every == 0 or step == args.steps:
            print(f"step {step}/{args.steps} loss {float(loss):.2f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(manager, state)
        time.sleep(max(0.0, began + args.step_ms / 1000 - time.monotonic()))
    save(manager, state)
    if step < args.steps:
        return 143
    if args.out:
        write_final(args.out, state["params"])
    print(f"done after {step} steps", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
