"""A search around the trial, on Ray Tune or in this process; ray.py and nodes.py are the only modules that import ray.

Ray reads its switches from the environment, some of them when it is imported: hence here, before anything below this
package can import it. A value the user has set stays.
"""

import os
import secrets
import sys
from pathlib import Path

from tune_prune.core.errors import UserError

for _name, _value in {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a worker without GPUs sees none
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed|Raylet is terminated",  # pages; records say it in a line
    "RAY_prestart_worker_first_driver": "0",  # workers that start with Ray are none that the actors of Ray Tune can be
    "RAY_worker_niceness": "0",  # Ray's 15 starves workers, and their search, beside any other program
    "RAY_AIR_NEW_OUTPUT": "0",  # the new output prints tables even at verbose=0
    "TUNE_MAX_PENDING_TRIALS_PG": "64",  # actors that start side by side; some versions start one after the other
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the ledger and our own TensorBoard files replace them
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # acc_mean is not known before the first slice
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C raises KeyboardInterrupt at once; the ledger needs no last snapshot
}.items():
    os.environ.setdefault(_name, _value)


# Without a cluster Ray listens on 127.0.0.1 alone. Windows and macOS have this switch for that; it works on Linux, too.
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def set_up_ray(address: str | None) -> None:
    """Set the switches of a Ray at `address` (None: a local one), which Ray reads as it is imported: before that. Raises UserError
    where it was imported with others. Does nothing where this process has a Ray."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return
    of_its_own = os.environ.get(_LOOPBACK) == "0"
    if address is None:
        if ray is not None and not of_its_own:
            raise UserError(
                f"ray was imported before this search, which cannot start one on 127.0.0.1 then: set {_LOOPBACK}=0 before that "
                "import, call ray.init() yourself, or do without Ray by inline=True (--inline)"
            )
        # It asks for a token of its own. No proxy of a user's cluster leads to 127.0.0.1.
        os.environ.update({_LOOPBACK: "0", "RAY_grpc_enable_http_proxy": "0"})
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    elif of_its_own:
        raise UserError(
            f"this Python process has had a Ray of its own, which joins no cluster ({_LOOPBACK}=0); restart Python to use --address"
        )
    elif address == "auto" and not os.environ.get("RAY_ADDRESS") and Path("~/.ray/auth_token").expanduser().exists():
        # A cluster of this machine; the token is not given away to another one.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
