"""How the processes of a job find and trust each other: its key, and a small key-value store that only holders of the key can use."""
