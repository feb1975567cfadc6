"""The BabyLM challenge's evaluation: files, scores as the official pipeline counts them, and the leaderboard's file."""
