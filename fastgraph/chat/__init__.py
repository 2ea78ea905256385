"""The chat in a terminal. `conversation` asks, `view` shows, `prompt` reads, `commands` steer, `session` ties them."""
