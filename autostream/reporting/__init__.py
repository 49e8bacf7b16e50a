"""What is known of one signature, and its output as text, JSON, DOT, a trace and an HTML page. No decisions here."""
