"""`python -m domino_deploy`: the command where its script is not on the path."""

from __future__ import annotations

from domino_deploy.cli import main

main(prog_name="domino-deploy")
