"""The command line: one file per subcommand, which parses, calls and prints.

Windows, which has no `fcntl`, is refused here, before an import fails.
"""

import json
import sys
from importlib.util import find_spec

from bertkit.errors import DataError

UNIX_ONLY = "bertkit runs on Linux and macOS; on Windows, install it within WSL (in PowerShell: wsl --install)"

if find_spec("fcntl") is None:
    if "--json" in sys.argv:
        print(json.dumps({"error": UNIX_ONLY, "code": DataError.exit_code}))
    print(f"error: {UNIX_ONLY}", file=sys.stderr)
    raise SystemExit(DataError.exit_code)
