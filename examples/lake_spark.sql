-- The lake in Spark SQL, with Delta's extension, as docs/lake.md runs it: the variable folder is LAKE/APPLICATION.
-- If keys are bytes, their column is key_bytes.
-- The days with the most closed windows:
SELECT to_date(window_end) AS day, count(*) AS windows, count(DISTINCT key) AS keys
FROM delta.`${folder}/closed/${store}` GROUP BY day ORDER BY windows DESC;
-- The windows that have been open the longest. The newest row of a window counts. `state` keeps a sliding window for a
-- while after it was closed, when it ends before the close time of its store:
WITH newest AS (
    SELECT *, row_number() OVER (PARTITION BY partition, key, start_ms ORDER BY changelog_offset DESC) AS nth
    FROM delta.`${folder}/state` WHERE row = 'window' AND store = '${store}'
), covered AS (
    SELECT partition, CAST(get_json_object(max_by(progress, changelog_offset), "$.close_times_ms['${store}']") AS BIGINT)
        AS close_ms
    FROM delta.`${folder}/state` WHERE row = 'progress' GROUP BY partition
)
SELECT CAST(key AS STRING) AS key, end_ms - start_ms AS ms FROM newest LEFT JOIN covered USING (partition)
WHERE nth = 1 AND live AND end_ms >= coalesce(close_ms, end_ms) ORDER BY ms DESC, key LIMIT 3;
