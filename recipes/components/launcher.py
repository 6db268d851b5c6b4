# SPDX-License-Identifier: Apache-2.0
"""The end of torchrun on a host that is cut off from the others."""

import os
import subprocess
import sys

SECONDS_FOR_LAUNCHER = 20  # torchrun ends within some seconds of its ranks, if nothing blocks it.
# Kills the process of a descriptor unless it ends within some seconds
KILL_LATER = """
import select, signal, sys
process, seconds = map(int, sys.argv[1:])
if not select.select([process], [], [], seconds)[0]:
    signal.pidfd_send_signal(process, signal.SIGKILL)
"""


def end_blocked_launcher() -> None:
    """Have torchrun killed if it is still there some seconds after its ranks have ended.

    If the network drops its packets, torchrun waits in a read from the store, without a time limit,
    until the kernel gives up the connection after about 15 minutes (net.ipv4.tcp_retries2). It
    handles no signal meanwhile, and the host would not be free. A launcher that may restart its
    ranks is not killed: it waits for the lost host, and then continues without it.
    """
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS") != "0":
        return
    launcher = os.pidfd_open(os.getppid())
    command = [sys.executable, "-c", KILL_LATER, str(launcher), str(SECONDS_FOR_LAUNCHER)]
    subprocess.Popen(command, pass_fds=[launcher], start_new_session=True)
