"""The evaluation of the BabyLM challenge: files, scores as in the official pipeline, and the leaderboard's file."""
