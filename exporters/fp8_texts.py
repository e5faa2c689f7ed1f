"""Text to calibrate float8 with: conversations of our own, of the kinds that chat models are asked for; no benchmark's prompts."""

from __future__ import annotations

# Question and answer.
CONVERSATIONS: tuple[tuple[str, str], ...] = (
    (
        "Write a Python function that merges two sorted lists without using sort().",
        "```python\ndef merge(left: list[int], right: list[int]) -> list[int]:\n"
        '    """Merge two sorted lists into one."""\n'
        "    merged, i, j = [], 0, 0\n"
        "    while i < len(left) and j < len(right):\n"
        "        if left[i] <= right[j]:\n            merged.append(left[i])\n            i += 1\n"
        "        else:\n            merged.append(right[j])\n            j += 1\n"
        "    return merged + left[i:] + right[j:]\n```\n\n"
        "Both lists are walked once, so it takes O(n + m) steps. One of the two slices at the end is always empty.",
    ),
    (
        "A baker fills 18 trays with 24 rolls each and sells five sixths of them for 45 cents apiece. How much does she earn?",
        "She bakes 18 × 24 = 432 rolls.\n\nFive sixths of them are 432 × 5 / 6 = 360 rolls.\n\n"
        "At 0.45 each that makes 360 × 0.45 = 162.\n\n**She earns 162.00 and has 72 rolls left.**",
    ),
    (
        "Why does ice float on water?",
        "Most substances shrink when they freeze. Water is an exception: in ice each molecule is held by four neighbours in an open "
        "lattice, which leaves more empty space than the loose, shifting arrangement of the liquid. A kilogram of ice therefore fills "
        "about nine percent more room than a kilogram of water, and what is less dense rises. This is also why lakes freeze from the "
        "top, and why a full bottle in the freezer bursts.",
    ),
    (
        "Give me the planets that have rings as JSON, with the year in which the rings were discovered.",
        '```json\n{\n  "planets": [\n    {"name": "Saturn", "rings_discovered": 1610},\n    {"name": "Uranus", "rings_discovered": 1977},\n'
        '    {"name": "Jupiter", "rings_discovered": 1979},\n    {"name": "Neptune", "rings_discovered": 1984}\n  ]\n}\n```',
    ),
    (
        "Schreibe einen kurzen Absatz über den Herbst an der Küste.",
        "Im Oktober gehört der Strand wieder den Möwen. Der Wind kommt kühl über das graue Wasser, die Strandkörbe sind längst "
        "abgebaut, und in den Dünen raschelt das trockene Gras. Wer jetzt noch spazieren geht, zieht den Kragen hoch, sammelt "
        "vielleicht ein paar Muscheln und freut sich auf den heißen Tee danach.",
    ),
    (
        "用两三句话解释什么是光合作用。再给我一个法语的总结。",
        "光合作用是植物利用阳光，把二氧化碳和水转化为糖类并释放氧气的过程。它主要在叶绿体中进行，为地球上几乎所有的生命提供能量。\n\n"
        "En français : la photosynthèse permet aux plantes de transformer la lumière, l'eau et le gaz carbonique en sucres et en oxygène.",
    ),
    (
        "My SQL query is slow: SELECT * FROM orders WHERE YEAR(created_at) = 2024; What can I do?",
        "The function call hides the column from the index. Compare the bare column with a range instead:\n\n"
        "```sql\nCREATE INDEX idx_orders_created ON orders (created_at);\n\n"
        "SELECT id, customer_id, total\nFROM orders\nWHERE created_at >= '2024-01-01' AND created_at < '2025-01-01';\n```\n\n"
        "1. The range lets the database walk the index.\n2. Naming the columns saves reading those you do not need.\n"
        "3. Check with `EXPLAIN` that the index is used.",
    ),
    (
        "Write the opening of a story about a lighthouse keeper who receives a letter.",
        "The supply boat came on Tuesdays, and it never brought mail. So when Tomas climbed down to the landing and found an envelope "
        "on top of the flour sack, he first took it for a mistake. His name stood on it in green ink. The stamp was foreign, the paper "
        'smelled faintly of oranges, and on the back someone had written: "Do not open this before the storm." He looked up. '
        "There was not a single cloud in the sky.",
    ),
)
