"""What only the book needs: its chapters, the papers' numbers, figures, kept results, and how pages are made."""
