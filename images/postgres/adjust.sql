-- What toolathlon_gym's runner changes in the database before each task (run_parallel.sh): messages can be deleted
-- although they are in the log of sent ones.
DO $$
BEGIN
    IF to_regclass('email.sent_log') IS NOT NULL THEN
        ALTER TABLE email.sent_log DROP CONSTRAINT IF EXISTS sent_log_message_id_fkey;
        ALTER TABLE email.sent_log ADD CONSTRAINT sent_log_message_id_fkey
            FOREIGN KEY (message_id) REFERENCES email.messages (id) ON DELETE CASCADE;
    END IF;
END
$$;
