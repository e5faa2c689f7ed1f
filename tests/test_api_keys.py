"""What can be sent as a key."""

from __future__ import annotations

import pytest

from domino_deploy.api_keys import is_key, is_visible_ascii


@pytest.mark.parametrize(("text", "is_good"), [("!sk-A1~", True), ("a b", False), ("a\n", False), ("\x7f", False), ("ä", False)])
def test_visible_ascii_without_spaces_is_a_key(text: str, is_good: bool) -> None:
    assert is_key(text) == is_visible_ascii(text) == is_good


def test_nothing_is_no_key() -> None:
    assert not is_key("")
