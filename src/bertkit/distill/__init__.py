"""What a student learns from a teacher, and how a student begins; which steps are taken is the loop's to say."""
