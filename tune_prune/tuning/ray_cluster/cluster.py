"""The Ray a search runs on: started here and ended here, or joined; checked before anything expensive starts."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import ray
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.services import find_node_ids
from ray._private.utils import read_ray_address
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]  # compiled
from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]  # generated
from ray.exceptions import AuthenticationError

from tune_prune.core import machine, terminal
from tune_prune.core.errors import NotStarted, UserError
from tune_prune.tuning.ray_cluster import address as address_check
from tune_prune.tuning.ray_cluster.head import QUIET, for_this_process
from tune_prune.tuning.ray_cluster.local import INSTEAD, LocalRay
from tune_prune.tuning.ray_cluster.loss import RayLost, check_alive, silence_of, watched

PROBE_TIMEOUT_S = 10.0


@contextmanager
def connected(address: str | None, num_cpus: int | None = None, local: LocalRay | None = None) -> Iterator[None]:
    """A Ray to work with: one that is already up in this process, the cluster at `address`, or a local one: `local`, else one of
    `num_cpus` that ends here.

    Leaves a Ray that was up before as it was. Raises UserError when nothing answers at `address`, NotStarted when a local
    Ray does not start, tried twice, RayLost where one ends before its time, and ever after.
    """
    logging.getLogger("ray.tune").setLevel(
        logging.CRITICAL
    )  # it prints a traceback per failed trial; the ledger has them
    check_alive()
    if ray.is_initialized():
        yield
        return
    with ExitStack() as stack:
        with terminal.waiting("starting: Ray, whose workers run the trials ..."):
            if address is not None:
                head = _join(address)
                wait: Callable[[threading.Event], str] = partial(silence_of, head)
            else:
                own = local or stack.enter_context(LocalRay(num_cpus))
                head, wait = own.address(), lambda _: own.wait_for_loss()  # which comes back when that Ray ends
        try:
            with watched(wait):
                if address is None:
                    _join_local(head)  # watched, too: a Ray that dies now would be waited for for two minutes
                yield
        except RayLost:
            raise  # a shutdown would wait for what is no more
        except BaseException:
            ray.shutdown()
            raise
        ray.shutdown()


def _join_local(address: str) -> None:
    """Join a Ray that is up in a process of its own."""
    Config.initialize("")  # RAY_AUTH_MODE, where ray was imported before it was set
    try:
        with for_this_process(), _own_signals():
            ray.init(address=address, **QUIET)
    except (ConnectionError, RuntimeError) as error:
        raise NotStarted(f"Ray did not answer ({str(error).splitlines()[0]}; {machine.load()}); {INSTEAD}") from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray is joined within. It puts a handler of its own in the place of ours, and its C++ library one that prints a stack trace
    and aborts; ours comes back, and hears what has come in the meantime."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = signal.getsignal(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, ours)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _named() -> str:
    """The address in RAY_ADDRESS; "" where that says no more than "auto"."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "auto" else address


def _announced() -> str:
    """What "auto" stands for: RAY_ADDRESS, else the address of the last `ray start` on this machine. Without either Ray would go on
    to join whatever Ray runs here, such as another search's own, and wait for minutes for one that is ending."""
    address = _named() or read_ray_address()
    if not address:
        raise UserError(
            "--address is auto, but no Ray cluster was started on this machine; start one with `ray start --head`, name its "
            "HOST:PORT, or leave --address out to use this machine alone"
        )
    return address


def _join(asked: str) -> str:
    """Join the cluster at the address `asked`; the address of its head. Raises UserError where none answers, and where it does not
    let this process in."""
    address = _announced() if asked == "auto" else asked
    address_check.check(address)
    # Ray sends this machine's token by itself to a cluster of this machine only; elsewhere it would be given away.
    own = asked == "auto" and not _named() and "RAY_AUTH_MODE" not in os.environ
    if not _lets_in(address) and own and AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")
    if not _lets_in(address):
        if os.environ.get("RAY_AUTH_MODE") == "token":
            raise UserError(
                f"the Ray cluster at {address} does not accept this machine's token: copy ~/.ray/auth_token of its head to "
                "~/.ray/auth_token here (RAY_AUTH_TOKEN and RAY_AUTH_TOKEN_PATH come before it)"
            )
        raise UserError(
            f"the Ray cluster at {address} asks for a token: set RAY_AUTH_MODE=token, and have ~/.ray/auth_token of its head on "
            "this machine"
        )
    environment = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}}
    try:
        with _own_signals():
            ray.init(address=address, runtime_env=environment, **QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"no Ray cluster answers at {address} ({str(error).splitlines()[0]}): start one with `ray start --head`, correct "
            "--address, or leave it out to use this machine alone"
        ) from error
    return address


def _lets_in(address: str) -> bool:
    """Whether the head at `address` accepts the token that this process sends, or its having none: Ray would ask again for 20 s and
    then say that nothing answers. Raises UserError where no node of that cluster runs here: Ray would look for one for a minute."""
    try:
        ensure_token_if_auth_enabled(create_token_if_missing=False)
        with _silent():
            client = GcsClient(address=address)
            members = client.get_all_node_info(timeout=PROBE_TIMEOUT_S, state_filter=GcsNodeInfo.GcsNodeState.ALIVE)
    except AuthenticationError:
        return False
    if not {member.hex() for member in members} & set(find_node_ids()):
        raise UserError(
            f"this machine is no node of the Ray cluster at {address}: start the search on one of "
            f"its nodes, or join it: `ray start --address={address}`, with --num-cpus=0 to run no trials here"
        )
    return True


@contextmanager
def _silent() -> Iterator[None]:
    """Ray's compiled part warns of what becomes a sentence here; it writes to the standard error itself."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
