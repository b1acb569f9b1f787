"""The command `swiftspec`: programs that decode, chat, serve and train."""
