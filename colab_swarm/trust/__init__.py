"""Who may take part, and who gave how much: the authority, its members, revocation, the contribution ledger."""
