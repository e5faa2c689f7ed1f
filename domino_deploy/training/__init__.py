"""Training a drafter for one's own target: prompts, regenerated responses, features, batches, objective, trainer."""
