"""A search around the trial, on Ray Tune or in this process; ray_cluster/ is the only folder that imports ray.

Ray reads its switches from the environment, some of them when it is imported: hence here, before anything below this
package can import it. A value the user has set stays.
"""

import os

for _name, _value in {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a worker without GPUs sees none
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed|Raylet is terminated",  # pages; records say it in a line
    "RAY_idle_worker_killing_time_threshold_ms": "60000",  # else those that wait for their trial end as Tune reserves their CPUs
    "RAY_worker_niceness": "0",  # Ray's 15 starves workers, and their search, beside any other program
    "RAY_AIR_NEW_OUTPUT": "0",  # the new output prints tables even at verbose=0
    "TUNE_MAX_PENDING_TRIALS_PG": "64",  # actors that start side by side; some versions start one after the other
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the ledger and our own TensorBoard files replace them
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # acc_mean is not known before the first slice
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C raises KeyboardInterrupt at once; the ledger needs no last snapshot
}.items():
    os.environ.setdefault(_name, _value)
