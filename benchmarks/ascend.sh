#!/usr/bin/env bash
# Reproduces the published tables for Ascend NPUs on the machine it runs on, and prints the vendor's figures beside:
#
#   benchmarks/ascend.sh [--json FILE] [--rounds N] [--only NAME]
#   benchmarks/ascend.sh --list       the rows and the vendor's figures, without a device
#
# PYTHON names the interpreter, python3 by default. CANN is sourced if it is installed and has not been.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${ASCEND_HOME_PATH:-}" ]]; then
  for settings in /usr/local/Ascend/{ascend-toolkit,cann}/set_env.sh "$HOME"/Ascend/{ascend-toolkit,cann}/set_env.sh; do
    if [[ -r "$settings" ]]; then
      set +u # the vendor's script reads variables that may not be set
      # shellcheck disable=SC1090  # which of them it is shows at run time
      source "$settings"
      set -u
      break
    fi
  done
fi

# Without CANN a torch_npu that loads itself breaks `import torch`; the benchmark imports it and says what is missing.
export TORCH_DEVICE_BACKEND_AUTOLOAD=0
exec "${PYTHON:-python3}" -m benchmarks.ascend "$@"
